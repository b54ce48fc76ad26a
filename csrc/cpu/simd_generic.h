// 128-bit primitives in compiler vectors, for any processor. Included by simd.h only.
#pragma once

#include <string.h>

namespace vllm_cpu::generic {

constexpr int kLanes = 4;
constexpr int kBlockRows = 4;
constexpr int kBlockVectors = 2;
constexpr int kFewRows = 4;         // rows multiplied without scratch
constexpr bool kHasBFloat16Dot = false;

typedef float F __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));

VLLM_INLINE F as_float(U x) { return (F)x; }
VLLM_INLINE U as_units(F x) { return (U)x; }

VLLM_INLINE F load(const float* p) {
  F x;
  memcpy(&x, p, sizeof x);
  return x;
}
VLLM_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
VLLM_INLINE F set1(float x) { return F{x, x, x, x}; }
VLLM_INLINE F add(F a, F b) { return a + b; }
VLLM_INLINE F sub(F a, F b) { return a - b; }
VLLM_INLINE F mul(F a, F b) { return a * b; }
VLLM_INLINE F div(F a, F b) { return a / b; }
VLLM_INLINE F fma(F a, F b, F c) { return a * b + c; }
VLLM_INLINE F max(F a, F b) { return a > b ? a : b; }
VLLM_INLINE F min(F a, F b) { return a < b ? a : b; }

// Nearest even, for |x| below 2^22.
VLLM_INLINE F round(F x) {
  const F magic = set1(12582912.f);
  return (x + magic) - magic;
}

VLLM_INLINE F floor(F x) {
  const F near = round(x);
  return near > x ? near - 1.f : near;
}
// x - floor(x)
VLLM_INLINE F fraction(F x) { return x - floor(x); }
// x * 2^floor(n) for n in [-126, 128).
VLLM_INLINE F scale_pow2(F x, F n) {
  return x * (F)((__builtin_convertvector(floor(n), I) + 127) << 23);
}
// x, or 0 where test < bound (a NaN test keeps x).
VLLM_INLINE F zero_below(F x, F test, F bound) {
  return test < bound ? set1(0.f) : x;
}

VLLM_INLINE float reduce_max(F x) {
  const float a = x[0] > x[1] ? x[0] : x[1];
  const float b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
VLLM_INLINE float reduce_add(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }

VLLM_INLINE U u_load(const uint32_t* p) {
  U x;
  memcpy(&x, p, sizeof x);
  return x;
}
VLLM_INLINE void u_store(uint32_t* p, U x) { memcpy(p, &x, sizeof x); }
VLLM_INLINE U u_set1(uint32_t x) { return U{x, x, x, x}; }

VLLM_INLINE F keep_range(F x, int lo, int hi) {
  const I lane = {0, 1, 2, 3};
  return ((lane >= lo) & (lane < hi)) ? x : set1(-__builtin_inff());
}

VLLM_INLINE F load_f32(const void* p, int count) {
  F x = set1(0.f);
  memcpy(&x, p, smaller(count, kLanes) * 4);
  return x;
}
VLLM_INLINE void store_f32(void* p, F x, int count) {
  memcpy(p, &x, smaller(count, kLanes) * 4);
}

VLLM_INLINE U load_halves(const void* p, int count) {
  uint16_t part[kLanes] = {};
  memcpy(part, p, smaller(count, kLanes) * 2);
  return U{part[0], part[1], part[2], part[3]};
}
VLLM_INLINE void store_halves(void* p, U x, int count) {
  uint16_t part[kLanes];
  for (int i = 0; i < kLanes; ++i) part[i] = static_cast<uint16_t>(x[i]);
  memcpy(p, part, smaller(count, kLanes) * 2);
}

// The exponent is moved by a multiplication, which also normalises subnormals.
VLLM_INLINE F widen_f16(U high) {  // from the high half of each unit
  const F size = as_float((high >> 3) & 0x0fffe000u) * set1(0x1p112f);
  const U special = (U)(size >= set1(0x1p16f)) & 0x7f800000u;
  return as_float((high & 0x80000000u) | special | as_units(size));
}
VLLM_INLINE F load_f16(const void* p, int count) {
  return widen_f16(load_halves(p, count) << 16);
}
VLLM_INLINE F load_f16(const void* p) { return load_f16(p, kLanes); }
// The float16 in the low and in the high halves of units.
VLLM_INLINE void split_f16(U units, F& low, F& high) {
  low = widen_f16(units << 16);
  high = widen_f16(units);
}
VLLM_INLINE F load_bf16(const void* p, int count) {
  return as_float(load_halves(p, count) << 16);
}

// Round to nearest even; overflow goes to infinity, NaN stays NaN.
VLLM_INLINE U narrow_f16(F x) {
  const U bits = as_units(x);
  const U sign = (bits >> 16) & 0x8000u;
  const U magnitude = bits & 0x7fffffffu;
  const U rounding = ((magnitude >> 13) & 1u) + 0xfffu;
  const U normal = (magnitude - ((127u - 15u) << 23) + rounding) >> 13;
  // Below 2^-14 one unit is 2^-24: adding 0.5 lines the units up with the last bits.
  const U small = as_units(as_float(magnitude) + set1(0.5f)) - as_units(set1(0.5f));
  const U special = magnitude > 0x7f800000u ? u_set1(0x7e00u) : u_set1(0x7c00u);
  U half = magnitude < ((127u - 14u) << 23) ? small : normal;
  half = magnitude >= 0x477ff000u ? special : half;
  return sign | half;
}
VLLM_INLINE void store_f16(void* p, F x, int count) {
  store_halves(p, narrow_f16(x), count);
}
VLLM_INLINE void store_f16(void* p, F x) { store_f16(p, x, kLanes); }
VLLM_INLINE F round_f16(F x) { return widen_f16(narrow_f16(x) << 16); }
VLLM_INLINE void store_bf16(void* p, F x, int count) {
  const U bits = as_units(x);
  const U high = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  store_halves(p, (bits & 0x7fffffffu) > 0x7f800000u ? u_set1(0x7fc0u) : high, count);
}

VLLM_INLINE void transpose(U (&r)[4]) {
  const U a = __builtin_shuffle(r[0], r[1], U{0, 4, 1, 5});
  const U b = __builtin_shuffle(r[0], r[1], U{2, 6, 3, 7});
  const U c = __builtin_shuffle(r[2], r[3], U{0, 4, 1, 5});
  const U d = __builtin_shuffle(r[2], r[3], U{2, 6, 3, 7});
  r[0] = __builtin_shuffle(a, c, U{0, 1, 4, 5});
  r[1] = __builtin_shuffle(a, c, U{2, 3, 6, 7});
  r[2] = __builtin_shuffle(b, d, U{0, 1, 4, 5});
  r[3] = __builtin_shuffle(b, d, U{2, 3, 6, 7});
}

}  // namespace vllm_cpu::generic
