// The C ABI of the CUDA kernels: plain structs of device pointers, strides and counts.
//
// Knows nothing of torch or Python; vllm/v1/attention/ops/cuda_kernels.py mirrors these
// structs field by field and refuses a library whose struct sizes differ. Every launcher
// returns a cudaError_t, 0 for success; nothing waits for the device.
#pragma once

#include "../common/cache.h"

namespace vllm_cuda {

using vllm_common::Pages;
using vllm_common::Rows;

struct NvFp4StoreArgs {
  Pages pages;                  // num_heads counts KV heads, each of two head slots;
                                // codes of a group lie at multiples of 8 bytes
  Rows key;                     // [tokens, heads, size]
  Rows value;                   // the same
  const int64_t* slot_mapping;  // [num_tokens]; outside the cache: skipped
  int32_t num_tokens;
  int32_t four_over_six;        // the better of two scales
  int32_t linear;               // V scales state by state
  float k_scale;                // per tensor
  float v_scale;
};

struct DsMlaStoreArgs {
  Pages pages;                  // one head slot; states at multiples of 4 bytes
  Rows latent;                  // [tokens, 1, latent elements]
  Rows rope;                    // [tokens, 1, rotary elements]
  const int64_t* slot_mapping;  // as above
  int32_t num_tokens;
  int32_t unused;
};

// A cache of many blocks as bytes: in every block `count` runs of `bytes` bytes, `stride`
// bytes apart. Fewer than 2^31 in all.
struct BlockRuns {
  uint8_t* data;
  int64_t block_stride;
  int64_t count;
  int64_t stride;
  int64_t bytes;
};

struct BlockArgs {
  const BlockRuns* caches;  // [num_caches], on the device
  const int64_t* blocks;    // [num_blocks] to zero; [num_blocks, 2] source and target
  int64_t most_units;       // units of the cache with the most of them
  int32_t num_caches;
  int32_t num_blocks;
  int32_t unit;             // bytes moved at once: 16, 8, 4, 2 or 1; divides all the above
  int32_t unused;
};

}  // namespace vllm_cuda
