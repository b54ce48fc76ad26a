// How an attention call is cut into work, and what a kernel offers to do with a piece.
//
// A row is one (query token, query head) pair of a KV head's group; rows of a request
// are numbered token by token. A tile is up to kMaxRows consecutive rows. Keys are cut
// at fixed positions into chunks of kChunkStates. A row's result is the left fold of
// its chunks' softmax states, whoever computes them: the same query and cache give the
// same bits in any batch, prefill chunking or thread count.
#pragma once

#include "api.h"
#include "experts.h"
#include "linear.h"
#include "screen.h"
#include "step.h"

namespace vllm_cpu {

constexpr int kMaxRows = 120;       // twenty register blocks of six rows
constexpr int kTileStates = 64;     // states unpacked at a time
constexpr int kChunkStates = 512;

struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Keys that the query at `position` of a sequence of `seq_len` tokens attends to.
static inline __attribute__((always_inline)) KeyRange key_range(const AttentionArgs& a,
                                                                int64_t seq_len,
                                                                int64_t position) {
  KeyRange range{0, a.causal ? position + 1 : seq_len};
  if (a.sliding_window > 0) {
    const int64_t oldest = position - a.sliding_window + 1;
    const int64_t newest = position + a.sliding_window;
    if (range.begin < oldest) range.begin = oldest;
    if (range.end > newest) range.end = newest;
  }
  if (range.end > seq_len) range.end = seq_len;
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

// A tile of rows over a run of chunks. With `partials` each chunk's softmax state is
// left there, one after another; without, the chunks are folded and the rows written.
struct WorkItem {
  int32_t request;
  int32_t kv_head;
  int32_t row_begin;
  int32_t row_end;
  KeyRange keys;        // that any of the rows attends to
  int32_t chunk_begin;
  int32_t chunk_end;
  float* partials;
};

// The kernel of one cell format on one instruction set.
struct AttentionKernel {
  int64_t (*scratch_bytes)(const AttentionArgs&);                // per thread
  int64_t (*partial_floats)(const AttentionArgs&, int num_rows); // per chunk
  // `next` (or null) is the item this thread is likely to do after: its first cells are
  // brought near while the last of this one are read.
  void (*attend)(const AttentionArgs&, const WorkItem&, const WorkItem* next,
                 void* scratch);
  // Folds `partials` of chunks [chunk_begin, chunk_end) and writes the rows.
  void (*merge)(const AttentionArgs&, const WorkItem&, void* scratch);
};

// Everything one instruction set offers. A null kernel: not supported.
struct KernelTable {
  const char* isa;
  const AttentionKernel* (*attention)(int32_t cell_format, int32_t query_dtype);
  int32_t (*store)(const StoreArgs&);
  double (*read)(const void* data, int64_t num_bytes);  // a checksum, to time reads
  const ExpertsKernel* (*experts)(int32_t dtype);
  const LinearKernel* (*linear)(int32_t dtype);
  const ScreenKernel* (*screen)(int32_t dtype);  // null where it does not pay
  // Rows [begin, end) of an element-wise operation, and of one on heads.
  void (*step_rows)(const StepOp&, const StepInputs&, int64_t begin, int64_t end);
  void (*head_rows)(const StepOp&, const StepInputs&, int64_t begin, int64_t end);
};

}  // namespace vllm_cpu
