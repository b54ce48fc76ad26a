// Numbers of 16, 8 and 4 bits, one at a time: e4m3, e5m2, e2m1, float16 and bfloat16.
// Rounds to the nearest, halves to even. Knows nothing of scales and pages.
#pragma once

#include "host_device.h"

// GPUs round two numbers in one instruction: e4m3 from capability 8.9 on, e2m1 in the
// targets with an "a" of 10.0 and 12.0.
#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 890
#define VLLM_HAS_E4M3_INSTRUCTION
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define VLLM_HAS_E2M1_INSTRUCTION
#endif
#endif

namespace vllm_common {

constexpr float kE4M3Max = 448.f;
constexpr float kE5M2Max = 57344.f;
constexpr float kE2M1Max = 6.f;
constexpr float kBFloat16Max = 0x1.fep127f;

// The code of a float; magnitudes up to `limit`, the largest finite one, stay in range,
// and larger ones and infinities become it. NaN gets the code of all ones below the sign.
template <int kBits, int kMantissaBits, int kBias>
VLLM_HOST_DEVICE uint32_t small_code(float x, float limit) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kSign = 1u << (kBits - 1);
  const uint32_t sign = bits_of(x) >> (32 - kBits) & kSign;
  float size = magnitude(x);
  const bool is_nan = size != size;
  size = size < limit ? size : limit;
  const uint32_t bits = bits_of(size);
  const uint32_t normal = (bits + ((1u << (kDropped - 1)) - 1) + (bits >> kDropped & 1)) -
                          (static_cast<uint32_t>(127 - kBias) << 23);
  // Below the smallest normal number one unit is `step`: a sum with 2^23 of them rounds
  // to whole units in its last bits.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 - kBias + 1 + kDropped) << 23;
  const uint32_t small = bits_of(size + float_of(kMagic)) - kMagic;
  const bool is_small = bits < static_cast<uint32_t>(127 - kBias + 1) << 23;
  const uint32_t code = is_small ? small : normal >> kDropped;
  return sign | (is_nan ? kSign - 1 : code);
}

VLLM_HOST_DEVICE uint32_t e4m3_code(float x) { return small_code<8, 3, 7>(x, kE4M3Max); }
VLLM_HOST_DEVICE uint32_t e5m2_code(float x) {
  return small_code<8, 2, 15>(x, kE5M2Max);
}
VLLM_HOST_DEVICE uint32_t e2m1_code(float x) { return small_code<4, 1, 1>(x, kE2M1Max); }

// A sign bit and a magnitude whose exponent is moved by a multiplication, which also
// normalises subnormals. Exact; the caller gives codes of special values their meaning.
template <int kBits, int kMantissaBits, int kBias>
VLLM_HOST_DEVICE uint32_t small_bits(uint32_t code) {
  constexpr uint32_t kSign = 1u << (kBits - 1);
  const float factor = float_of(static_cast<uint32_t>(127 + 127 - kBias) << 23);
  const float size = float_of((code & (kSign - 1)) << (23 - kMantissaBits));
  return bits_of(size * factor) | (code & kSign) << (32 - kBits);
}

VLLM_HOST_DEVICE float e4m3_value(uint32_t code) {
  const uint32_t nan = (code & 0x7fu) == 0x7fu ? 0x7fc00000u : 0u;
  return float_of(small_bits<8, 3, 7>(code) | nan);
}

VLLM_HOST_DEVICE float e5m2_value(uint32_t code) {
  const uint32_t special = (code & 0x7fu) >= 0x7cu ? 0x7f800000u : 0u;
  return float_of(small_bits<8, 2, 15>(code) | special);
}

VLLM_HOST_DEVICE float e2m1_value(uint32_t code) {
  return float_of(small_bits<4, 1, 1>(code));
}

// --- 16 bits ---------------------------------------------------------------------------

VLLM_HOST_DEVICE float bf16_value(uint32_t bits) { return float_of(bits << 16); }

VLLM_HOST_DEVICE float f16_value(uint32_t bits) {
  const uint32_t special = (bits & 0x7fffu) >= 0x7c00u ? 0x7f800000u : 0u;
  return float_of(small_bits<16, 10, 15>(bits) | special);
}

// Overflow gives infinity; NaN becomes the quiet one.
VLLM_HOST_DEVICE uint32_t bf16_bits(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return x == x ? rounded : 0x7fc0u;
}

// --- two codes at once, of finite numbers ------------------------------------------------

// Two e2m1 codes in a byte, the first in the low nibble.
VLLM_HOST_DEVICE uint32_t e2m1_pair(float low, float high) {
#if defined(VLLM_HAS_E2M1_INSTRUCTION)
  uint16_t pair;
  asm("{ .reg .b8 byte;\n"
      "  cvt.rn.satfinite.e2m1x2.f32 byte, %2, %1;\n"
      "  mov.b16 %0, {byte, 0}; }"
      : "=h"(pair)
      : "f"(low), "f"(high));
  return pair;
#else
  return e2m1_code(low) | e2m1_code(high) << 4;
#endif
}

VLLM_HOST_DEVICE uint32_t e4m3_pair(float low, float high) {
#if defined(VLLM_HAS_E4M3_INSTRUCTION)
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(low), "f"(high));
  return pair;
#else
  return e4m3_code(low) | e4m3_code(high) << 8;
#endif
}

}  // namespace vllm_common
