// How 16 numbers become e2m1 codes and one e4m3 scale. The arithmetic is that of
// vllm/v1/kv_formats/nvfp4.py, operation by operation, to the same bytes.
#pragma once

#include "small_floats.h"

namespace vllm_common {

constexpr int kNvFp4Group = 16;
constexpr float kNvFp4InputLimit = 0x1p58f;  // squared errors of a group stay finite

struct NvFp4Block {
  uint32_t codes[kNvFp4Group / 8];  // low nibbles first, as they are stored
  uint32_t scale;
};

// scale = e4m3(amax * reciprocal / global_scale); a scale of zero gives codes of zero.
VLLM_HOST_DEVICE NvFp4Block nvfp4_block(const float (&x)[kNvFp4Group], float reciprocal,
                                        float global_scale) {
  float largest = 0.f;
  for (int i = 0; i < kNvFp4Group; ++i) {
    const float size = magnitude(x[i]);
    largest = size > largest ? size : largest;
  }
  NvFp4Block block = {{0u, 0u}, e4m3_pair(largest * reciprocal / global_scale, 0.f)};
  const float step = e4m3_value(block.scale) * global_scale;
  const float inverse = step > 0.f ? 1.f / step : 0.f;
  for (int i = 0; i < kNvFp4Group; i += 2) {
    block.codes[i / 8] |= e2m1_pair(x[i] * inverse, x[i + 1] * inverse) << i % 8 * 4;
  }
  return block;
}

// Sum of squared errors, added by halving as casts.tree_sum does.
VLLM_HOST_DEVICE float nvfp4_error(const NvFp4Block& block, const float (&x)[kNvFp4Group],
                                   float global_scale) {
  const float step = e4m3_value(block.scale) * global_scale;
  float squares[kNvFp4Group];
  for (int i = 0; i < kNvFp4Group; ++i) {
    const float off = e2m1_value(block.codes[i / 8] >> i % 8 * 4 & 15u) * step - x[i];
    squares[i] = off * off;
  }
  for (int half = kNvFp4Group / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) squares[i] += squares[half + i];
  }
  return squares[0];
}

// Of any numbers. With `four_over_six` a denominator of 4 is taken where its error is
// strictly smaller than with 6.
VLLM_HOST_DEVICE NvFp4Block nvfp4_quantise(float (&x)[kNvFp4Group], float global_scale,
                                           bool four_over_six) {
  for (int i = 0; i < kNvFp4Group; ++i) x[i] = made_finite(x[i], kNvFp4InputLimit);
  const NvFp4Block block = nvfp4_block(x, static_cast<float>(1.0 / 6.0), global_scale);
  if (!four_over_six) return block;
  const NvFp4Block other = nvfp4_block(x, 0.25f, global_scale);
  const bool better =
      nvfp4_error(other, x, global_scale) < nvfp4_error(block, x, global_scale);
  return better ? other : block;
}

}  // namespace vllm_common
