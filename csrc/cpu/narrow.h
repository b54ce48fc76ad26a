// Small numbers as floats: codes of 8 and 4 bits, kLanes at a time, for any instruction
// set. Exact; NaN and infinities of the 8-bit types are kept.
#pragma once

#include <string.h>

#include "../common/small_floats.h"
#include "simd.h"

namespace vllm_cpu::VLLM_ISA {

using vllm_common::e2m1_code;
using vllm_common::e4m3_code;
using vllm_common::e5m2_code;

typedef uint32_t Codes __attribute__((vector_size(kLanes * 4)));
typedef float Floats __attribute__((vector_size(kLanes * 4)));

// kLanes bytes, one per lane; and kLanes nibbles, the low one of a byte first. Written
// per instruction set: compilers widen vectors of bytes one by one.
#if defined(__AVX512BF16__)
VLLM_INLINE Codes load_bytes(const uint8_t* p) {
  return (Codes)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
VLLM_INLINE Codes load_nibbles(const uint8_t* p) {
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i wide = _mm_cvtepu8_epi16(packed);
  const __m128i parted = _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)),
                                       _mm_set1_epi16(0x0f0f));
  return (Codes)_mm512_cvtepu8_epi32(parted);
}
#elif defined(__AVX2__)
VLLM_INLINE Codes load_bytes(const uint8_t* p) {
  return (Codes)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
VLLM_INLINE Codes load_nibbles(const uint8_t* p) {
  int32_t packed;
  memcpy(&packed, p, sizeof packed);
  const __m128i wide = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(packed));
  const __m128i parted = _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)),
                                       _mm_set1_epi16(0x0f0f));
  return (Codes)_mm256_cvtepu8_epi32(parted);
}
#else
VLLM_INLINE Codes load_bytes(const uint8_t* p) { return Codes{p[0], p[1], p[2], p[3]}; }
VLLM_INLINE Codes load_nibbles(const uint8_t* p) {
  return Codes{p[0] & 15u, p[0] / 16u, p[1] & 15u, p[1] / 16u};
}
#endif

// small_code of common/small_floats.h, lane by lane.
template <int kBits, int kMantissaBits, int kBias>
VLLM_INLINE Codes small_codes(F x, float limit) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kSign = 1u << (kBits - 1);
  constexpr uint32_t kSmallest = static_cast<uint32_t>(127 - kBias + 1) << 23;
  constexpr uint32_t kMagic = kSmallest + (static_cast<uint32_t>(kDropped) << 23);
  const Codes sign = (Codes)x >> (32 - kBits) & kSign;
  const Floats magnitude = (Floats)((Codes)x & 0x7fffffffu);
  const Codes is_nan = (Codes)(magnitude != magnitude);
  const Codes bits = (Codes)min((F)magnitude, set1(limit));
  const Codes normal = bits + ((1u << (kDropped - 1)) - 1) + (bits >> kDropped & 1) -
                       (static_cast<uint32_t>(127 - kBias) << 23);
  const Codes small = (Codes)((Floats)bits + (Floats)((Codes{}) + kMagic)) - kMagic;
  const Codes is_small = (Codes)(bits < kSmallest);
  const Codes code = (small & is_small) | (normal >> kDropped & ~is_small);
  return sign | (code & ~is_nan) | (is_nan & (kSign - 1));
}

VLLM_INLINE Codes e4m3_codes(F x) {
  return small_codes<8, 3, 7>(x, vllm_common::kE4M3Max);
}
VLLM_INLINE Codes e2m1_codes(F x) {
  return small_codes<4, 1, 1>(x, vllm_common::kE2M1Max);
}

VLLM_INLINE F floats_of(Codes bits) { return (F)bits; }

// A sign bit and a magnitude whose exponent is moved by a multiplication, which also
// normalises subnormals.
template <int kBits, int kMantissaBits, int kBias>
VLLM_INLINE Codes small_float(Codes code) {
  constexpr uint32_t kSign = 1u << (kBits - 1);
  union {
    uint32_t bits;
    float value;
  } const factor = {static_cast<uint32_t>(127 + 127 - kBias) << 23};
  const Floats magnitude = (Floats)((code & (kSign - 1)) << (23 - kMantissaBits));
  const Codes scaled = (Codes)(magnitude * factor.value);
  return scaled | ((code & kSign) << (32 - kBits));
}

// Of a format that stores no NaN.
VLLM_INLINE F finite_e4m3(Codes code) { return floats_of(small_float<8, 3, 7>(code)); }

VLLM_INLINE F e4m3(Codes code) {
  const Codes value = small_float<8, 3, 7>(code);
  const Codes is_nan = (Codes)((code & 0x7fu) == 0x7fu);
  return floats_of(value | (is_nan & 0x7fc00000u));
}

VLLM_INLINE F e5m2(Codes code) {
  const Codes value = small_float<8, 2, 15>(code);
  const Codes special = (Codes)((code & 0x7fu) >= 0x7cu);
  return floats_of(value | (special & 0x7f800000u));
}

VLLM_INLINE F e2m1(Codes code) { return floats_of(small_float<4, 1, 1>(code)); }

VLLM_INLINE F int8(Codes code) {
  typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
  const Ints signed_code = (Ints)(code << 24) >> 24;
  return (F)__builtin_convertvector(signed_code, Floats);
}

VLLM_INLINE F uint4(Codes code) {
  typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
  return (F)__builtin_convertvector((Ints)code, Floats);
}

}  // namespace vllm_cpu::VLLM_ISA
