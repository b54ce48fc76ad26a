// What the translation unit of a latent format gives: a cell as a row of numbers, and a
// row as a cell. Encoders do the torch formats' operations one by one, to the same bytes:
// no product is fused with a sum.
#pragma once

#pragma GCC optimize("fp-contract=off")

#include "narrow.h"
#include "work.h"

namespace vllm_cpu::VLLM_ISA {

struct CodingArgs {
  int size;       // elements of a latent with its rotary part, a multiple of 32
  float scale;    // per tensor
  int dtype;      // of the row before it became float32
};

// Writes `size` elements of `cell` to `row`: float32, or bfloat16 rounded to nearest.
using DecodeCell = void (*)(const CodingArgs&, const uint8_t* cell, void* row);

// Writes a cell from `size` float32 elements.
using EncodeCell = void (*)(const CodingArgs&, const float* row, uint8_t* cell);

// The coders of one format, and the bytes of its cell.
struct LatentFormat {
  DecodeCell to_float32;
  DecodeCell to_bfloat16;
  EncodeCell encode;
  int64_t (*cell_bytes)(int size);
};

constexpr int kMaxLatent = 1024;  // elements that a store takes

// NaN as 0, and nothing beyond the limit.
VLLM_INLINE float finite_below(float x, float limit) {
  const float y = x < limit ? x : limit;
  const float z = y > -limit ? y : -limit;
  return x == x ? z : 0.f;
}

// So that nothing overflows on the way back.
VLLM_INLINE float finite(float x) { return finite_below(x, 0x1p127f); }

VLLM_INLINE float largest_size(const float* x, int count) {
  float largest = 0.f;
  for (int i = 0; i < count; ++i) {
    const float size = __builtin_fabsf(finite(x[i]));
    largest = size > largest ? size : largest;
  }
  return largest;
}

template <int kDType>
VLLM_INLINE void put(void* row, int elem, F x) {
  uint8_t* const to = static_cast<uint8_t*>(row) + elem * dtype_bytes(kDType);
#if defined(__AVX512BF16__)
  if constexpr (kDType == kBFloat16) {  // flushes subnormal numbers
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
    return;
  }
#endif
  store_from_float<kDType>(to, x);
}

// Of any cell format; null for dense ones and those of no latent.
const LatentFormat* latent_format(int32_t cell_format);

const LatentFormat* fp8_latent(int32_t cell_format);
const LatentFormat* per_token_head_latent(int32_t cell_format);
const LatentFormat* ds_mla_latent(int32_t cell_format);

}  // namespace vllm_cpu::VLLM_ISA
