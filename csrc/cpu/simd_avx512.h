// 512-bit primitives: AVX512 F, BW, VL, DQ and BF16. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace vllm_cpu::avx512 {

constexpr int kLanes = 16;
constexpr int kBlockRows = 6;     // accumulators of one product block: 6 x 4 registers
constexpr int kBlockVectors = 4;
constexpr int kFewRows = 8;         // rows multiplied without scratch
constexpr bool kHasBFloat16Dot = true;

using F = __m512;
using U = __m512i;

VLLM_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
VLLM_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
VLLM_INLINE F set1(float x) { return _mm512_set1_ps(x); }
VLLM_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
VLLM_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
VLLM_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
VLLM_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
VLLM_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
VLLM_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
VLLM_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
VLLM_INLINE F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
// x - floor(x)
VLLM_INLINE F fraction(F x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
// x * 2^floor(n) for n in [-126, 128).
VLLM_INLINE F scale_pow2(F x, F n) { return _mm512_scalef_ps(x, n); }
// x, or 0 where test < bound (a NaN test keeps x).
VLLM_INLINE F zero_below(F x, F test, F bound) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, bound, _CMP_NLT_UQ), x);
}
VLLM_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
VLLM_INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x); }

// reduce(x[i]) in lane i, with the operands of reduce_max and reduce_add: of lanes 8
// apart, then 4, 2 and 1.
template <class Combine>
VLLM_INLINE F reduce_each(const F (&x)[16], Combine combine) {
  F y[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const F ab = combine(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x44),
                         _mm512_shuffle_f32x4(x[i], x[i + 4], 0xee));
    const F cd = combine(_mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x44),
                         _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xee));
    y[i] = combine(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const __m512d p = _mm512_castps_pd(y[i]);
    const __m512d q = _mm512_castps_pd(y[i + 1]);
    y[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)),
                   _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  return combine(_mm512_shuffle_ps(y[0], y[2], 0x88), _mm512_shuffle_ps(y[0], y[2], 0xdd));
}
VLLM_INLINE F reduce_max_each(const F (&x)[16]) {
  return reduce_each(x, [](F a, F b) __attribute__((always_inline)) { return max(a, b); });
}
VLLM_INLINE F reduce_add_each(const F (&x)[16]) {
  return reduce_each(x, [](F a, F b) __attribute__((always_inline)) { return add(a, b); });
}

VLLM_INLINE U u_load(const uint32_t* p) { return _mm512_loadu_si512(p); }
VLLM_INLINE void u_store(uint32_t* p, U x) { _mm512_storeu_si512(p, x); }
VLLM_INLINE U u_set1(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
VLLM_INLINE F as_float(U x) { return _mm512_castsi512_ps(x); }
VLLM_INLINE U as_units(F x) { return _mm512_castps_si512(x); }

VLLM_INLINE __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1u);
}

// Lanes [lo, hi) of x; -inf elsewhere. lo and hi may lie outside the register.
VLLM_INLINE F keep_range(F x, int lo, int hi) {
  const __m512i lane =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 keep = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(lo)) &
                         _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(hi));
  return _mm512_mask_mov_ps(set1(-__builtin_inff()), keep, x);
}

VLLM_INLINE F load_f32(const void* p, int count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), p);
}
VLLM_INLINE F load_f16(const void* p, int count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
VLLM_INLINE F load_f16(const void* p) {  // a whole register
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
VLLM_INLINE F load_bf16(const void* p, int count) {
  const __m256i half = _mm256_maskz_loadu_epi16(first_lanes(count), p);
  return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
VLLM_INLINE void store_f32(void* p, F x, int count) {
  _mm512_mask_storeu_ps(p, first_lanes(count), x);
}
VLLM_INLINE void store_f16(void* p, F x, int count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count),
                           _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
VLLM_INLINE void store_f16(void* p, F x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
VLLM_INLINE F round_f16(F x) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// The float16 in the low and in the high halves of units.
VLLM_INLINE void split_f16(U units, F& low, F& high) {
  alignas(64) static const uint16_t kOrder[32] = {
      0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
      1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const U parted = _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), units);
  low = _mm512_cvtph_ps(_mm512_castsi512_si256(parted));
  high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(parted, 1));
}
// Round to nearest even; NaN stays NaN. The instruction would flush subnormal numbers.
VLLM_INLINE void store_bf16(void* p, F x, int count) {
  const __m512i bits = as_units(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), u_set1(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, u_set1(0x7fff)));
  const __m512i high = _mm512_mask_mov_epi32(
      _mm512_srli_epi32(sum, 16), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u_set1(0x7fc0));
  _mm256_mask_storeu_epi16(p, first_lanes(count), _mm512_cvtepi32_epi16(high));
}

// 16 rows of 16 units become 16 columns.
VLLM_INLINE void transpose(U (&r)[16]) {
  U t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const U lo01 = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const U hi01 = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const U lo23 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const U hi23 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(lo01, lo23, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(lo01, lo23, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(hi01, hi23, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(hi01, hi23, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// 32 consecutive 16-bit elements, 0 past `count`.
VLLM_INLINE U load_pairs(const void* p, int count) {
  const __mmask32 keep = count >= 32 ? 0xffffffffu : (1u << count) - 1u;
  return _mm512_maskz_loadu_epi16(keep, p);
}

}  // namespace vllm_cpu::avx512
