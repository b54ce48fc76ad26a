// The conversions of csrc/common over arrays, for comparison with other ones.
#include "csrc/common/small_floats.h"

using namespace vllm_common;

extern "C" {

void codes_of(const float* x, int64_t count, int kind, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(kind == 0   ? e4m3_code(x[i])
                                    : kind == 1 ? e5m2_code(x[i])
                                                : e2m1_code(x[i]));
  }
}

void values_of(const uint8_t* codes, int64_t count, int kind, float* x) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = kind == 0   ? e4m3_value(codes[i])
           : kind == 1 ? e5m2_value(codes[i])
                       : e2m1_value(codes[i]);
  }
}

// Two numbers at a time: [count / 2] pairs of e2m1 in a byte, of e4m3 in two.
void pairs_of(const float* x, int64_t count, int kind, uint8_t* codes) {
  for (int64_t i = 0; i + 1 < count; i += 2) {
    if (kind == 2) {
      codes[i / 2] = static_cast<uint8_t>(e2m1_pair(x[i], x[i + 1]));
      continue;
    }
    const uint32_t pair = e4m3_pair(x[i], x[i + 1]);
    codes[i] = static_cast<uint8_t>(pair);
    codes[i + 1] = static_cast<uint8_t>(pair >> 8);
  }
}

void halves_as_floats(const uint16_t* bits, int64_t count, int is_bf16, float* x) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = is_bf16 != 0 ? bf16_value(bits[i]) : f16_value(bits[i]);
  }
}

void floats_as_bf16(const float* x, int64_t count, uint16_t* bits) {
  for (int64_t i = 0; i < count; ++i) bits[i] = static_cast<uint16_t>(bf16_bits(x[i]));
}
}
