// 256-bit primitives: AVX2, FMA and F16C. Included by simd.h only.
#pragma once

#include <immintrin.h>
#include <string.h>

namespace vllm_cpu::avx2 {

constexpr int kLanes = 8;
constexpr int kBlockRows = 6;     // accumulators of one product block: 6 x 2 registers
constexpr int kBlockVectors = 2;
constexpr int kFewRows = 4;         // rows multiplied without scratch
constexpr bool kHasBFloat16Dot = false;

using F = __m256;
using U = __m256i;

VLLM_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
VLLM_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
VLLM_INLINE F set1(float x) { return _mm256_set1_ps(x); }
VLLM_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
VLLM_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
VLLM_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
VLLM_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
VLLM_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
VLLM_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
VLLM_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
VLLM_INLINE F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT); }

// x - floor(x)
VLLM_INLINE F fraction(F x) { return sub(x, _mm256_floor_ps(x)); }
// x * 2^floor(n) for n in [-126, 128).
VLLM_INLINE F scale_pow2(F x, F n) {
  const __m256i whole = _mm256_cvtps_epi32(_mm256_floor_ps(n));
  const __m256i e = _mm256_add_epi32(whole, _mm256_set1_epi32(127));
  return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}
// x, or 0 where test < bound (a NaN test keeps x).
VLLM_INLINE F zero_below(F x, F test, F bound) {
  return _mm256_and_ps(x, _mm256_cmp_ps(test, bound, _CMP_NLT_UQ));
}

VLLM_INLINE float reduce_max(F x) {
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
VLLM_INLINE float reduce_add(F x) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}

VLLM_INLINE U u_load(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
VLLM_INLINE void u_store(uint32_t* p, U x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
VLLM_INLINE U u_set1(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
VLLM_INLINE F as_float(U x) { return _mm256_castsi256_ps(x); }
VLLM_INLINE U as_units(F x) { return _mm256_castps_si256(x); }

VLLM_INLINE __m256i lane_numbers() {
  return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
}
VLLM_INLINE __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane_numbers());
}

VLLM_INLINE F keep_range(F x, int lo, int hi) {
  const __m256i lane = lane_numbers();
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane);
  const __m256i above = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(lo - 1));
  const __m256i keep = _mm256_and_si256(below, above);
  return _mm256_blendv_ps(set1(-__builtin_inff()), x, as_float(keep));
}

VLLM_INLINE __m128i load_halves(const void* p, int count) {
  if (count >= kLanes) return _mm_loadu_si128(static_cast<const __m128i*>(p));
  alignas(16) uint16_t part[8] = {};
  memcpy(part, p, count * 2);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(part));
}
VLLM_INLINE void store_halves(void* p, __m128i x, int count) {
  if (count >= kLanes) return _mm_storeu_si128(static_cast<__m128i*>(p), x);
  alignas(16) uint16_t part[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(part), x);
  memcpy(p, part, count * 2);
}

VLLM_INLINE F load_f32(const void* p, int count) {
  const float* from = static_cast<const float*>(p);
  if (count >= kLanes) return _mm256_loadu_ps(from);
  return _mm256_maskload_ps(from, first_lanes(count));
}
VLLM_INLINE F load_f16(const void* p, int count) {
  return _mm256_cvtph_ps(load_halves(p, count));
}
VLLM_INLINE F load_f16(const void* p) { return load_f16(p, kLanes); }
VLLM_INLINE F load_bf16(const void* p, int count) {
  return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p, count)), 16));
}
VLLM_INLINE void store_f32(void* p, F x, int count) {
  float* to = static_cast<float*>(p);
  if (count >= kLanes) return _mm256_storeu_ps(to, x);
  _mm256_maskstore_ps(to, first_lanes(count), x);
}
VLLM_INLINE void store_f16(void* p, F x, int count) {
  store_halves(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), count);
}
VLLM_INLINE void store_f16(void* p, F x) { store_f16(p, x, kLanes); }
VLLM_INLINE F round_f16(F x) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// The float16 in the low and in the high halves of units.
VLLM_INLINE void split_f16(U units, F& low, F& high) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m256i parted =
      _mm256_permute4x64_epi64(_mm256_shuffle_epi8(units, order), 0xd8);
  low = _mm256_cvtph_ps(_mm256_castsi256_si128(parted));
  high = _mm256_cvtph_ps(_mm256_extracti128_si256(parted, 1));
}
// Round to nearest even; NaN stays NaN.
VLLM_INLINE void store_bf16(void* p, F x, int count) {
  const __m256i bits = as_units(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i high = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i is_nan = as_units(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  store_halves(p, _mm256_castsi256_si128(packed), count);
}

VLLM_INLINE void transpose(U (&r)[8]) {
  U t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

}  // namespace vllm_cpu::avx2
