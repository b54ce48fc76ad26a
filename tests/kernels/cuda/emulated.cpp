// The launchers of csrc/cuda on the host: the same functions for the same work items,
// one after another, over host memory. Only the sharing out of items is not the GPU's.
#include "csrc/cuda/blocks.h"
#include "csrc/cuda/ds_mla_store.h"
#include "csrc/cuda/nvfp4_store.h"

using namespace vllm_cuda;

namespace {

template <class Move>
int for_all(const BlockArgs& a, Move move) {
  const uint32_t units = static_cast<uint32_t>(a.most_units);
  for (int block = 0; block < a.num_blocks; ++block) {
    for (int cache = 0; cache < a.num_caches; ++cache) {
      for (uint32_t unit = 0; unit < units; ++unit) move(a, {block, cache, unit});
    }
  }
  return 0;
}

struct CopyAll {
  template <class Unit>
  int operator()(const BlockArgs& a) {
    return for_all(a, [](auto& args, BlockItem item) { copy_item<Unit>(args, item); });
  }
};

struct ZeroAll {
  template <class Unit>
  int operator()(const BlockArgs& a) {
    return for_all(a, [](auto& args, BlockItem item) { zero_item<Unit>(args, item); });
  }
};

void store_tile(const DsMlaStoreArgs& a, int64_t token, int tile, uint8_t* record) {
  float x[kLanes][kTilePerLane];
  float largest = 0.f;
  for (int lane = 0; lane < kLanes; ++lane) {
    const float size = ds_mla_load_tile(a, token, tile, lane, x[lane]);
    largest = size > largest ? size : largest;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    ds_mla_put_tile(record, tile, lane, x[lane], ds_mla_step(largest));
  }
}

}  // namespace

extern "C" {

int64_t vllm_cuda_abi() {
  return static_cast<int64_t>(sizeof(NvFp4StoreArgs)) << 32 |
         static_cast<int64_t>(sizeof(DsMlaStoreArgs)) << 16 | sizeof(BlockArgs);
}

const char* vllm_cuda_error(int) { return "no error"; }

int vllm_cuda_nvfp4_store(const NvFp4StoreArgs* a, void*) {
  for (uint32_t i = 0; i < nvfp4_items(*a); ++i) nvfp4_store_one(*a, i);
  return 0;
}

int vllm_cuda_ds_mla_store(const DsMlaStoreArgs* a, void*) {
  for (int64_t token = 0; token < a->num_tokens; ++token) {
    uint8_t* const record = ds_mla_record(*a, token);
    if (record == nullptr) continue;
    for (int tile = 0; tile < kDsMlaTiles; ++tile) store_tile(*a, token, tile, record);
    for (int lane = 0; lane < kLanes; ++lane) ds_mla_put_rope(*a, token, lane, record);
  }
  return 0;
}

int vllm_cuda_copy_blocks(const BlockArgs* a, void*) { return with_unit(*a, CopyAll{}); }
int vllm_cuda_zero_blocks(const BlockArgs* a, void*) { return with_unit(*a, ZeroAll{}); }
}
