// What every kernel that touches a KV cache is told about it, as plain structs that
// Python mirrors: pages, rows of activations, and where a state lies.
#pragma once

#include "small_floats.h"

namespace vllm_common {

// Types of activations (query, key, value, output).
enum DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// One layer's cache as bytes, [blocks, heads, states, cell]. Strides in bytes; a cell
// is contiguous.
struct Pages {
  uint8_t* data;
  int64_t block_stride;
  int64_t head_stride;
  int64_t state_stride;
  int64_t num_blocks;
  int32_t num_heads;
  int32_t block_size;
};

// Rows of [tokens, heads, size]. Strides in elements; the last axis is contiguous.
struct Rows {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
  int32_t dtype;
  int32_t size;
};

// Block and state of a slot. False for slots outside the cache, such as -1. A cache has
// fewer than 2^31 slots: GPUs divide 32 bits inline.
struct Place {
  int64_t block;
  int64_t state;
};

VLLM_HOST_DEVICE bool place_of(const Pages& pages, int64_t slot, Place& place) {
  if (slot < 0 || slot >= pages.num_blocks * pages.block_size) return false;
  const uint32_t index = static_cast<uint32_t>(slot);
  place.block = index / static_cast<uint32_t>(pages.block_size);
  place.state = index % static_cast<uint32_t>(pages.block_size);
  return true;
}

// In few wide accesses where the address allows it.
template <class T, int kCount>
VLLM_HOST_DEVICE void load_values(T (&to)[kCount], const T* from) {
  constexpr int kBytes = sizeof to % 16 == 0 ? 16 : sizeof to % 8 == 0 ? 8 : 4;
  if (reinterpret_cast<uintptr_t>(from) % kBytes == 0) {
    memcpy(to, __builtin_assume_aligned(from, kBytes), sizeof to);
  } else {
    for (int i = 0; i < kCount; ++i) to[i] = from[i];
  }
}

// Elements first ... first + kCount - 1 of a row, as floats. NaN and infinities stay.
template <int kCount>
VLLM_HOST_DEVICE void load_row(const Rows& rows, int64_t token, int64_t head, int first,
                               float (&to)[kCount]) {
  const int64_t at = token * rows.token_stride + head * rows.head_stride + first;
  if (rows.dtype == kFloat32) {
    load_values(to, static_cast<const float*>(rows.data) + at);
    return;
  }
  uint16_t bits[kCount];
  load_values(bits, static_cast<const uint16_t*>(rows.data) + at);
  const bool is_bf16 = rows.dtype == kBFloat16;
  for (int i = 0; i < kCount; ++i) {
    to[i] = is_bf16 ? bf16_value(bits[i]) : f16_value(bits[i]);
  }
}

// Writes to an address that is a multiple of the size.
template <class T>
VLLM_HOST_DEVICE void put_aligned(uint8_t* to, const T& value) {
  memcpy(__builtin_assume_aligned(to, sizeof value), &value, sizeof value);
}

// Where byte `byte` of state `state` lies in a plane of `stride` bytes a state that
// alternates the bytes of `interleave` states; 1 is a plain record after another.
VLLM_HOST_DEVICE int64_t plane_offset(int64_t state, int64_t byte, int64_t stride,
                                      int64_t interleave) {
  const int64_t lane = static_cast<uint32_t>(state) % static_cast<uint32_t>(interleave);
  return (state - lane) * stride + byte * interleave + lane;
}

}  // namespace vllm_common
