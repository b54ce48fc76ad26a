// Walsh-Hadamard rotations of a head, block by block where its size is no power of two:
// the butterfly of hadamard.py, with the same additions in the same order.
#pragma once

#include "simd.h"

namespace vllm_cpu::VLLM_ISA {

// The largest power of two that divides the head size.
VLLM_INLINE int rotated_block(int size) { return size & -size; }

VLLM_INLINE void butterfly(float* low, float* high) {
  const F a = load(low);
  const F b = load(high);
  store(low, add(a, b));
  store(high, sub(a, b));
}

typedef int32_t LaneInts __attribute__((vector_size(kLanes * 4)));
typedef float LaneFloats __attribute__((vector_size(kLanes * 4)));

// Butterflies of lanes that lie `step` apart, in one register.
template <int kStep>
VLLM_INLINE F within(F x) {
  LaneInts partner;
  LaneInts sign;
  for (int i = 0; i < kLanes; ++i) {
    partner[i] = i ^ kStep;
    sign[i] = (i & kStep) != 0 ? INT32_MIN : 0;
  }
  const F other = (F)__builtin_shuffle((LaneFloats)x, partner);
  return add(other, (F)((LaneInts)x ^ sign));
}

// Unnormalised; applied twice it multiplies by the block's size. Whole registers: what
// lies past `size` is never mixed with the rest.
static void hadamard(float* x, int size) {
  const int block = rotated_block(size);
  for (int i = 0; i < size; i += kLanes) {
    F r = load(x + i);
    if (block > 1) r = within<1>(r);
    if (block > 2) r = within<2>(r);
    if constexpr (kLanes > 4) {
      if (block > 4) r = within<4>(r);
    }
    if constexpr (kLanes > 8) {
      if (block > 8) r = within<8>(r);
    }
    store(x + i, r);
  }
  for (int step = kLanes; step < block; step *= 2) {
    for (int begin = 0; begin < size; begin += 2 * step) {
      float* const low = x + begin;
      for (int i = 0; i < step; i += kLanes) butterfly(low + i, low + step + i);
    }
  }
}

static void scale_by(float* x, int size, float factor) {
  for (int i = 0; i < size; ++i) x[i] *= factor;
}

static void scale_by(float* x, int size, const float* factors) {
  for (int i = 0; i < size; ++i) x[i] *= factors[i];
}

// The randomised transform of a query: its products with rotated keys are those of the
// keys themselves.
[[maybe_unused]] static void rotate_query_at_random(float* x, int size, const float* signs) {
  scale_by(x, size, signs);
  hadamard(x, size);
  scale_by(x, size, 1.f / static_cast<float>(rotated_block(size)));
}

// From a sum of rotated values back to one of values.
[[maybe_unused]] static void rotate_back(float* x, int size, const float* signs) {
  hadamard(x, size);
  scale_by(x, size, 1.f / static_cast<float>(rotated_block(size)));
  scale_by(x, size, signs);
}

// The orthonormal transform without signs, its own inverse.
[[maybe_unused]] static void rotate(float* x, int size) {
  const double block = rotated_block(size);
  hadamard(x, size);
  scale_by(x, size, static_cast<float>(1.0 / __builtin_sqrt(block)));
}

}  // namespace vllm_cpu::VLLM_ISA
