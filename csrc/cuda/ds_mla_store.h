// Which bytes of an fp8_ds_mla record the numbers of one lane become. A warp takes one
// part of a record: a tile of the latent, or the rotary part.
#pragma once

#include "../kv_formats.h"
#include "api.h"

namespace vllm_cuda {

constexpr int kLanes = 32;
constexpr kv_formats::fp8_ds_mla kDsMla{};
constexpr int kDsMlaTiles = static_cast<int>(kDsMla.nope_scale_count());
constexpr int kDsMlaTile = static_cast<int>(kDsMla.nope_count()) / kDsMlaTiles;
constexpr int kDsMlaParts = kDsMlaTiles + 1;
constexpr int kTilePerLane = kDsMlaTile / kLanes;
constexpr int kRopePerLane = static_cast<int>(kDsMla.rope_count()) / kLanes;
constexpr float kDsMlaInputLimit = 0x1p127f;
constexpr float kTiniestStep = 0x1p-126f;
static_assert(kTilePerLane == 4 && kRopePerLane == 2, "a lane writes 4 bytes at once");

VLLM_HOST_DEVICE uint8_t* ds_mla_record(const DsMlaStoreArgs& a, int64_t token) {
  vllm_common::Place place;
  if (!vllm_common::place_of(a.pages, a.slot_mapping[token], place)) return nullptr;
  return a.pages.data + place.block * a.pages.block_stride +
         place.state * a.pages.state_stride;
}

// Loads a lane's part of a tile; returns its largest magnitude.
VLLM_HOST_DEVICE float ds_mla_load_tile(const DsMlaStoreArgs& a, int64_t token, int tile,
                                        int lane, float (&x)[kTilePerLane]) {
  vllm_common::load_row(a.latent, token, 0, tile * kDsMlaTile + lane * kTilePerLane, x);
  float largest = 0.f;
  for (int i = 0; i < kTilePerLane; ++i) {
    x[i] = vllm_common::made_finite(x[i], kDsMlaInputLimit);
    const float size = vllm_common::magnitude(x[i]);
    largest = size > largest ? size : largest;
  }
  return largest;
}

VLLM_HOST_DEVICE float ds_mla_step(float largest) {
  const float step = largest / vllm_common::kE4M3Max;
  return step > kTiniestStep ? step : kTiniestStep;
}

VLLM_HOST_DEVICE void ds_mla_put_tile(uint8_t* record, int tile, int lane,
                                      const float (&x)[kTilePerLane], float step) {
  const uint32_t codes =
      vllm_common::e4m3_pair(x[0] / step, x[1] / step) |
      vllm_common::e4m3_pair(x[2] / step, x[3] / step) << 16;
  const int64_t at = kDsMla.nope_offset() + tile * kDsMlaTile + lane * kTilePerLane;
  vllm_common::put_aligned(record + at, codes);
  if (lane != 0) return;
  const int64_t scale = kDsMla.nope_scale_offset() + tile * int64_t{sizeof step};
  vllm_common::put_aligned(record + scale, step);
}

// Past bfloat16's range float32 saturates; what is narrower keeps its infinities.
VLLM_HOST_DEVICE uint32_t ds_mla_rope_bits(float x, int32_t dtype) {
  if (dtype == vllm_common::kFloat32) {
    const float above = x < -vllm_common::kBFloat16Max ? -vllm_common::kBFloat16Max : x;
    x = above > vllm_common::kBFloat16Max ? vllm_common::kBFloat16Max : above;
  }
  return vllm_common::bf16_bits(x);
}

VLLM_HOST_DEVICE void ds_mla_put_rope(const DsMlaStoreArgs& a, int64_t token, int lane,
                                      uint8_t* record) {
  float x[kRopePerLane];
  vllm_common::load_row(a.rope, token, 0, lane * kRopePerLane, x);
  const uint32_t pair = ds_mla_rope_bits(x[0], a.rope.dtype) |
                        ds_mla_rope_bits(x[1], a.rope.dtype) << 16;
  const int64_t at = kDsMla.rope_offset() + lane * int64_t{sizeof pair};
  vllm_common::put_aligned(record + at, pair);
}

}  // namespace vllm_cuda
