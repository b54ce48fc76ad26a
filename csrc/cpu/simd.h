// Picks the vector primitives of the instruction set this file is compiled for.
//
// Every simd_*.h offers the same names: `F` is a register of kLanes floats, `U` one of
// kLanes 32-bit units. A unit is what one multiply-accumulate lane eats: one float or
// two numbers of 16 bits. Everything lives in a namespace of its own per instruction set,
// so that the linker never mixes code compiled with different flags. No standard headers
// with inline functions are used below this line for the same reason.
#pragma once

#include <stdint.h>

#include "api.h"

#if defined(__AVX512BF16__)
#define VLLM_ISA avx512
#elif defined(__AVX2__)
#define VLLM_ISA avx2
#else
#define VLLM_ISA generic
#endif

#define VLLM_INLINE static inline __attribute__((always_inline))

namespace vllm_cpu::VLLM_ISA {

// To the second-level cache. Volatile: the compiler may neither gather prefetches into
// bursts nor drop a function that does nothing else.
VLLM_INLINE void prefetch_line(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

VLLM_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
VLLM_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
VLLM_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace vllm_cpu::VLLM_ISA

#if defined(__AVX512BF16__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace vllm_cpu::VLLM_ISA {

#if !defined(__AVX512BF16__)
// reduce(x[i]) in lane i.
VLLM_INLINE F reduce_max_each(const F (&x)[kLanes]) {
  float each[kLanes];
  for (int i = 0; i < kLanes; ++i) each[i] = reduce_max(x[i]);
  return load(each);
}
VLLM_INLINE F reduce_add_each(const F (&x)[kLanes]) {
  float each[kLanes];
  for (int i = 0; i < kLanes; ++i) each[i] = reduce_add(x[i]);
  return load(each);
}
#endif

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x < 128; relative error below 3e-7, exactly 1 at 0 and 0 below -125.5 (which
// spares the softmax every subnormal); NaN passes through. The polynomial has the least
// relative error on [0, 1] of those that are 1 at 0: 8.3e-8.
VLLM_INLINE F exp2(F x) {
  const F f = fraction(x);
  F p = set1(1.86712982e-3f);
  p = fma(p, f, set1(9.01703071e-3f));
  p = fma(p, f, set1(5.57999127e-2f));
  p = fma(p, f, set1(2.40164444e-1f));
  p = fma(p, f, set1(6.93151295e-1f));
  p = fma(p, f, set1(1.f));
  return zero_below(scale_pow2(p, x), x, set1(-125.5f));
}

VLLM_INLINE F exp(F x) { return exp2(mul(x, set1(kLog2E))); }

// tanh(x) = 1 - 2 / (e^2x + 1), saturating before e^2x overflows.
VLLM_INLINE F tanh(F x) {
  const F clipped = max(set1(-20.f), min(set1(20.f), x));
  const F e = exp(add(clipped, clipped));
  return sub(set1(1.f), div(set1(2.f), add(e, set1(1.f))));
}

// `count` (at most kLanes) elements of one type as floats; the rest of the lanes are 0.
template <int kDType>
VLLM_INLINE F load_as_float(const void* p, int count = kLanes) {
  if constexpr (kDType == kFloat32) return load_f32(p, count);
  if constexpr (kDType == kFloat16) return load_f16(p, count);
  if constexpr (kDType == kBFloat16) return load_bf16(p, count);
}

template <int kDType>
VLLM_INLINE void store_from_float(void* p, F x, int count = kLanes) {
  if constexpr (kDType == kFloat32) store_f32(p, x, count);
  if constexpr (kDType == kFloat16) store_f16(p, x, count);
  if constexpr (kDType == kBFloat16) store_bf16(p, x, count);
}

template <int kDType>
struct TypeOf {
  static constexpr int kValue = kDType;
};

// body(TypeOf<dtype>{}): the number of a type as a constant.
template <class Body>
VLLM_INLINE void with_type(int32_t dtype, const Body& body) {
  switch (dtype) {
    case kFloat32: return body(TypeOf<kFloat32>{});
    case kFloat16: return body(TypeOf<kFloat16>{});
    default: return body(TypeOf<kBFloat16>{});
  }
}

}  // namespace vllm_cpu::VLLM_ISA
