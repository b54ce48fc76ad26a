// The kernels and their launchers. What an item of work does is in the headers, which
// also compile for the host; here is only who does which item.
#include <cuda_runtime.h>

#include "blocks.h"
#include "ds_mla_store.h"
#include "nvfp4_store.h"

#define VLLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace vllm_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 16;  // threads take several items past this
constexpr int kMostEntries = 0xffff;      // of a grid's other axes

int blocks_for(int64_t items, int per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<int>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

// There are fewer than 2^31 items, and a stride is at most 2^24: no overflow.
__device__ uint32_t first_item() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ uint32_t item_stride() { return gridDim.x * blockDim.x; }

__global__ void __launch_bounds__(kThreads) nvfp4_store(NvFp4StoreArgs a) {
  const uint32_t items = nvfp4_items(a);
  for (uint32_t i = first_item(); i < items; i += item_stride()) nvfp4_store_one(a, i);
}

// A warp for each part of each record.
__global__ void __launch_bounds__(kThreads) ds_mla_store(DsMlaStoreArgs a) {
  const int lane = threadIdx.x % kLanes;
  const uint32_t parts = static_cast<uint32_t>(a.num_tokens) * kDsMlaParts;
  for (uint32_t i = first_item() / kLanes; i < parts; i += item_stride() / kLanes) {
    const int64_t token = i / kDsMlaParts;
    const int part = static_cast<int>(i % kDsMlaParts);
    uint8_t* const record = ds_mla_record(a, token);
    if (record == nullptr) continue;  // the whole warp
    if (part == kDsMlaTiles) {
      ds_mla_put_rope(a, token, lane, record);
      continue;
    }
    float x[kTilePerLane];
    float largest = ds_mla_load_tile(a, token, part, lane, x);
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, largest, distance);
      largest = other > largest ? other : largest;
    }
    ds_mla_put_tile(record, part, lane, x, ds_mla_step(largest));
  }
}

// A grid is units x caches x entries of the list.
template <void (*kMove)(const BlockArgs&, BlockItem)>
__device__ void move_blocks(const BlockArgs& a) {
  const uint32_t units = static_cast<uint32_t>(a.most_units);
  for (int block = blockIdx.z; block < a.num_blocks; block += gridDim.z) {
    for (int cache = blockIdx.y; cache < a.num_caches; cache += gridDim.y) {
      for (uint32_t unit = first_item(); unit < units; unit += item_stride()) {
        kMove(a, {block, cache, unit});
      }
    }
  }
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_blocks(BlockArgs a) {
  move_blocks<copy_item<Unit>>(a);
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) zero_blocks(BlockArgs a) {
  move_blocks<zero_item<Unit>>(a);
}

int smaller(int a, int b) { return a < b ? a : b; }

dim3 grid_of(const BlockArgs& a) {
  return dim3(blocks_for(a.most_units, kThreads), smaller(a.num_caches, kMostEntries),
              smaller(a.num_blocks, kMostEntries));
}

bool is_empty(const BlockArgs& a) {
  return a.most_units == 0 || a.num_caches == 0 || a.num_blocks == 0;
}

// An error of the launch itself; what happens on the device is reported later.
int launched() { return static_cast<int>(cudaGetLastError()); }

struct CopyBlocks {
  cudaStream_t stream;
  template <class Unit>
  int operator()(const BlockArgs& a) {
    copy_blocks<Unit><<<grid_of(a), kThreads, 0, stream>>>(a);
    return launched();
  }
};

struct ZeroBlocks {
  cudaStream_t stream;
  template <class Unit>
  int operator()(const BlockArgs& a) {
    zero_blocks<Unit><<<grid_of(a), kThreads, 0, stream>>>(a);
    return launched();
  }
};

}  // namespace
}  // namespace vllm_cuda

using namespace vllm_cuda;

// Sizes of the structs, for the check of the Python side.
VLLM_EXPORT int64_t vllm_cuda_abi() {
  return static_cast<int64_t>(sizeof(NvFp4StoreArgs)) << 32 |
         static_cast<int64_t>(sizeof(DsMlaStoreArgs)) << 16 | sizeof(BlockArgs);
}

VLLM_EXPORT const char* vllm_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

VLLM_EXPORT int vllm_cuda_nvfp4_store(const NvFp4StoreArgs* args, void* stream) {
  const int64_t items = nvfp4_items(*args);
  if (items == 0) return 0;
  nvfp4_store<<<blocks_for(items, kThreads), kThreads, 0,
                static_cast<cudaStream_t>(stream)>>>(*args);
  return launched();
}

VLLM_EXPORT int vllm_cuda_ds_mla_store(const DsMlaStoreArgs* args, void* stream) {
  const int64_t items = static_cast<int64_t>(args->num_tokens) * kDsMlaParts * kLanes;
  if (items == 0) return 0;
  ds_mla_store<<<blocks_for(items, kThreads), kThreads, 0,
                 static_cast<cudaStream_t>(stream)>>>(*args);
  return launched();
}

// Copies whole blocks; a block that is a source must not be a target of the same call.
VLLM_EXPORT int vllm_cuda_copy_blocks(const BlockArgs* args, void* stream) {
  if (is_empty(*args)) return 0;
  return with_unit(*args, CopyBlocks{static_cast<cudaStream_t>(stream)});
}

VLLM_EXPORT int vllm_cuda_zero_blocks(const BlockArgs* args, void* stream) {
  if (is_empty(*args)) return 0;
  return with_unit(*args, ZeroBlocks{static_cast<cudaStream_t>(stream)});
}
