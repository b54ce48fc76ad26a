// Small numbers as floats: codes of 8 and 4 bits, kLanes at a time, for any instruction
// set. Exact; NaN and infinities of the 8-bit types are kept.
#pragma once

#include <string.h>

#include "simd.h"

namespace vllm_cpu::VLLM_ISA {

typedef uint32_t Codes __attribute__((vector_size(kLanes * 4)));
typedef float Floats __attribute__((vector_size(kLanes * 4)));

// kLanes bytes, one per lane.
VLLM_INLINE Codes load_bytes(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Codes);
}

// kLanes nibbles, the low one of a byte first.
VLLM_INLINE Codes load_nibbles(const uint8_t* p) {
  typedef uint8_t Packed __attribute__((vector_size(kLanes / 2)));
  typedef uint16_t Wide __attribute__((vector_size(kLanes)));
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Packed packed;
  memcpy(&packed, p, sizeof packed);
  const Wide wide = __builtin_convertvector(packed, Wide);
  const Wide parted = (wide | wide << 4) & 0x0f0f;  // a nibble in each byte
  return __builtin_convertvector((Bytes)parted, Codes);
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
