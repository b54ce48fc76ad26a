// Functions that a C++ compiler and nvcc compile to the same arithmetic. They are static,
// so that units built for different instruction sets keep copies of their own.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define VLLM_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define VLLM_HOST_DEVICE static inline __attribute__((always_inline))
#endif

namespace vllm_common {

VLLM_HOST_DEVICE uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

VLLM_HOST_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

VLLM_HOST_DEVICE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

// NaN as 0, and nothing past +-limit.
VLLM_HOST_DEVICE float made_finite(float x, float limit) {
  const float above = x > -limit ? x : -limit;
  const float inside = above < limit ? above : limit;
  return x == x ? inside : 0.f;
}

}  // namespace vllm_common
