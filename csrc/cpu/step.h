// The C ABI of a step plan: a model's operations as records, run one after another.
//
// vllm/model_executor/step/records.py mirrors these structs field by field and refuses a
// library whose struct sizes differ. Activations are rows of one type throughout, and
// are rounded to it where PyTorch's operators round.
#pragma once

#include <stdint.h>

#include "api.h"

namespace vllm_cpu {

enum StepKind : int32_t {
  kStepEmbed = 0,   // out = row `token id` of the table `weight` [limit, size] * scale
  kStepNorm,        // out = norm(x + y), sum = x + y; without y: norm(x)
  kStepLinear,      // out = x W^T + b; args: LinearArgs
  kStepRotate,      // out = x, the first out_size elements of a head rotated
  kStepStore,       // args: StoreArgs; key and value into the cache
  kStepAttend,      // args: AttentionArgs
  kStepGate,        // out [size] = act(x[:size]) * x[size:]
  kStepAdd,         // out = x + y
  kStepSoftCap,     // out = scale * tanh(x / scale)
  kStepPick,        // out = the rows of x that are wanted
  kStepRoute,       // args: RouteArgs; from router logits x
  kStepExperts,     // args: ExpertsArgs, whose tokens are the heads of all rows
  kStepHeadLinear,  // args: LinearArgs [heads]: every head has a weight of its own
  kStepCopy,        // args: CopyArgs; heads of x into those of out
  kStepHadamard,    // out = x, every `out_size` elements of a head turned; see mode
  kStepWiden,       // out = x as float32
  kStepScale,       // out = x times weight [position]
  kStepSpread,      // out = heads, each x times its own of the floats y
  kStepSumHeads,    // out = the sum of the heads of x
  kStepLargest,     // out = int64: which of x is largest, the first of equal ones
  kStepLikeliest,   // args: ScreenArgs; int64: which logit would be largest
  kStepKinds,       // how many there are
};

// What `mode` says.
enum PickMode : int32_t {
  kPickWanted = 0,
  kPicked = 1,        // x has nothing but rows that are wanted
};
enum NormMode : int32_t {
  kNormRounded = 0,  // rounded to the type, then times weight
  kNormWhole = 1,    // times weight, then rounded
};
enum RotateMode : int32_t {
  kRotateHalves = 0,  // element i with i + size / 2
  kRotatePairs = 1,   // 2i with 2i + 1
};
enum HadamardMode : int32_t {
  kSignsFirst = 0,  // scale * hadamard(weight * x)
  kSignsLast = 1,   // scale * weight * hadamard(x)
};
enum GateMode : int32_t { kGateSilu = 0, kGateGelu = 1, kGateGeluTanh = 2 };

// For which tokens of the step an operation is.
enum StepTokens : int32_t {
  kAllTokens = 0,
  kWanted,        // those whose logits or tokens are wanted; attention: their queries
  kWantedLogits,  // those, in steps that need logits
  kWantedTokens,  // those, in steps that need nothing but the most likely tokens
};

// Rows of activations; the stride is in elements.
struct StepRows {
  void* data;
  int64_t stride;
};

struct StepOp {
  int32_t kind;
  int32_t dtype;
  int32_t mode;
  int32_t group;       // whose batch attention and stores take
  int32_t tokens;      // StepTokens
  int32_t heads;       // side by side in a row
  int32_t size;        // elements of a head
  int32_t out_size;
  int64_t limit;       // of token ids or positions
  StepRows out, x, y, sum;
  const void* weight;  // norms: float32 [size] or null; rotations: cos, sin per position;
                       // Hadamard: float32 [out_size] of +-1; scales: float32 [limit]
  int64_t weight_stride;
  float scale;
  float eps;
  void* args;
};

// How experts are chosen from router logits; see Routing in fused_moe/routing.py.
struct RouteArgs {
  int64_t* ids;        // [rows, top_k]
  float* weights;      // [rows, top_k]
  const float* bias;   // [experts] or null
  int32_t num_experts;
  int32_t top_k;
  int32_t sigmoid;     // scores: 0 softmax, 1 sigmoid
  int32_t num_groups;  // 0: none
  int32_t topk_groups;
  int32_t scores_per_group;
  int32_t renormalize;
  float scale;
};

// Heads that lie apart, as parts of larger ones; out.size elements of each.
struct CopyArgs {
  Rows out;
  Rows x;              // of out's type
};

// What one KV-cache group needs to know of the step.
struct StepBatch {
  const int32_t* query_start_loc;  // [num_requests + 1]
  const int32_t* seq_lens;         // [num_requests]
  const int32_t* block_table;      // [num_requests, block_table_width]
  const int64_t* slot_mapping;     // [num_tokens]
  int64_t block_table_stride;
  int32_t block_table_width;
  int32_t num_requests;
};

struct StepInputs {
  const int64_t* token_ids;        // [num_tokens]
  const int64_t* positions;        // [num_tokens]
  const int32_t* wanted;           // [num_wanted]: the last token of every request, or none
  const StepBatch* batches;
  int32_t num_tokens;
  int32_t num_wanted;
  int32_t num_batches;
  int32_t only_tokens;             // no logits are needed
};

}  // namespace vllm_cpu
