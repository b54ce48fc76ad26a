// Which bytes of which cache one work item of a block copy or a block zeroing moves.
#pragma once

#include "api.h"

namespace vllm_cuda {

struct alignas(16) Bytes16 {
  uint64_t parts[2];
};

// One unit of one cache of one entry in the list of blocks.
struct BlockItem {
  int32_t block;
  int32_t cache;
  uint32_t unit;
};

// Bytes between the start of a block and the unit; -1 past the cache's last one.
VLLM_HOST_DEVICE int64_t unit_offset(const BlockArgs& a, const BlockRuns& cache,
                                     uint32_t unit) {
  const uint32_t per_run = static_cast<uint32_t>(cache.bytes) / a.unit;
  const uint32_t run = unit / per_run;
  if (run >= cache.count) return -1;
  return run * cache.stride + static_cast<int64_t>(unit - run * per_run) * a.unit;
}

template <class Unit>
VLLM_HOST_DEVICE void copy_item(const BlockArgs& a, BlockItem item) {
  const BlockRuns cache = a.caches[item.cache];
  const int64_t offset = unit_offset(a, cache, item.unit);
  if (offset < 0) return;
  const int64_t source = a.blocks[2 * item.block] * cache.block_stride + offset;
  const int64_t target = a.blocks[2 * item.block + 1] * cache.block_stride + offset;
  *reinterpret_cast<Unit*>(cache.data + target) =
      *reinterpret_cast<const Unit*>(cache.data + source);
}

template <class Unit>
VLLM_HOST_DEVICE void zero_item(const BlockArgs& a, BlockItem item) {
  const BlockRuns cache = a.caches[item.cache];
  const int64_t offset = unit_offset(a, cache, item.unit);
  if (offset < 0) return;
  const int64_t target = a.blocks[item.block] * cache.block_stride + offset;
  *reinterpret_cast<Unit*>(cache.data + target) = Unit{};
}

// Work for the type of a unit: work.operator()<Unit>(args).
template <class Work>
int with_unit(const BlockArgs& a, Work work) {
  switch (a.unit) {
    case 16: return work.template operator()<Bytes16>(a);
    case 8: return work.template operator()<uint64_t>(a);
    case 4: return work.template operator()<uint32_t>(a);
    case 2: return work.template operator()<uint16_t>(a);
    default: return work.template operator()<uint8_t>(a);
  }
}

}  // namespace vllm_cuda
