// Small numbers as floats: codes of 8 and 4 bits, kLanes at a time, for any instruction
// set. Exact; NaN and infinities of the 8-bit types are kept.
#pragma once

#include <string.h>

#include "simd.h"

namespace vllm_cpu::VLLM_ISA {

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
  return Codes{p[0] & 15u, p[0] >> 4, p[1] & 15u, p[1] >> 4};
}
#endif

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

// Bits of a float as a small float's code, nearest even; magnitudes up to `limit`, the
// largest finite one, stay in range, and larger ones and infinities become it. NaN gets
// the code of all ones.
template <int kBits, int kMantissaBits, int kBias>
VLLM_INLINE uint32_t small_code(float x, float limit) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kSign = 1u << (kBits - 1);
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> (32 - kBits) & kSign;
  float size = __builtin_fabsf(x);
  const bool is_nan = size != size;
  size = size < limit ? size : limit;
  memcpy(&bits, &size, sizeof bits);
  const uint32_t normal = (bits + ((1u << (kDropped - 1)) - 1) + (bits >> kDropped & 1)) -
                          (static_cast<uint32_t>(127 - kBias) << 23);
  // Below the smallest normal number one unit is `step`: a sum with 2^23 of them rounds
  // to whole units in its last bits.
  union {
    uint32_t bits;
    float value;
  } const magic = {static_cast<uint32_t>(127 - kBias + 1 + kDropped) << 23};
  const float shifted = size + magic.value;
  uint32_t small;
  memcpy(&small, &shifted, sizeof small);
  small -= magic.bits;
  const bool is_small = bits < static_cast<uint32_t>(127 - kBias + 1) << 23;
  const uint32_t code = is_small ? small : normal >> kDropped;
  return sign | (is_nan ? kSign - 1 : code);
}

VLLM_INLINE uint32_t e4m3_code(float x) { return small_code<8, 3, 7>(x, 448.f); }
VLLM_INLINE uint32_t e5m2_code(float x) { return small_code<8, 2, 15>(x, 57344.f); }
VLLM_INLINE uint32_t e2m1_code(float x) { return small_code<4, 1, 1>(x, 6.f); }

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
