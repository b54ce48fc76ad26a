// The C ABI of a mixture of experts: one layer's packed weights and one call's tokens.
//
// vllm/model_executor/layers/fused_moe/cpu_experts.py mirrors the struct and packs the
// weights.
#pragma once

#include <stdint.h>

#include "linear.h"

namespace vllm_cpu {

enum GatedActivation : int32_t {
  kSiluGate = 0,    // g * sigmoid(g) * u
  kClampedGate = 1, // g * sigmoid(alpha g) * (u + 1); g <= limit, |u| <= limit
};

// Weights lie in panels (linear.h). A panel of w13 is kPanel / 2 gates and the ups that
// go with them; a panel of w2 is kPanel outputs.
struct ExpertsArgs {
  void* out;             // [num_tokens, hidden]
  const void* x;         // [num_tokens, hidden]
  const uint32_t* w13;   // [num_experts, panels, steps of hidden, kPanel]
  const uint32_t* w2;    // [num_experts, panels, steps of intermediate, kPanel]
  const float* bias13;   // [num_experts, panels * kPanel], ordered as w13, or null
  const float* bias2;    // [num_experts, panels * kPanel] or null
  const int64_t* ids;    // [num_tokens, top_k]
  const float* weights;  // [num_tokens, top_k]
  int64_t out_stride;    // elements from token to token
  int64_t x_stride;
  int32_t num_tokens;
  int32_t top_k;
  int32_t num_experts;
  int32_t hidden;
  int32_t intermediate;
  int32_t dtype;         // of out, x and both weights
  int32_t activation;
  float alpha;
  float limit;
};

// The experts of one instruction set, for one type. Tokens are taken in chunks; each is
// gone through in kExpertsParts parts, which are numbered through all chunks.
constexpr int kExpertsParts = 4;

struct ExpertsKernel {
  int64_t (*shared_bytes)(const ExpertsArgs&);   // of all threads
  int64_t (*scratch_bytes)(const ExpertsArgs&);  // of each
  int32_t (*num_parts)(const ExpertsArgs&);
  // Known once the parts before are done.
  int64_t (*num_items)(const ExpertsArgs&, int32_t part, const void* shared);
  void (*run)(const ExpertsArgs&, int32_t part, int64_t begin, int64_t end, void* shared,
              void* scratch);
};

}  // namespace vllm_cpu
