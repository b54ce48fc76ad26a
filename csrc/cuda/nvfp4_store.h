// Which bytes of an NVFP4 page one group of 16 numbers becomes.
#pragma once

#include "../common/nvfp4.h"
#include "../kv_formats.h"
#include "api.h"

namespace vllm_cuda {

// Work items of a store: token, side, head, group, the last one fastest. Fewer than 2^31.
VLLM_HOST_DEVICE uint32_t nvfp4_items(const NvFp4StoreArgs& a) {
  return static_cast<uint32_t>(a.num_tokens) * 2 * a.pages.num_heads *
         (a.key.size / vllm_common::kNvFp4Group);
}

template <class Format>
VLLM_HOST_DEVICE void nvfp4_store_item(const NvFp4StoreArgs& a, uint32_t item) {
  using namespace vllm_common;
  const Format f{a.key.size, a.value.size};
  const uint32_t groups = a.key.size / kNvFp4Group;
  const uint32_t heads = a.pages.num_heads;
  const int64_t group = item % groups;
  const int64_t head = item / groups % heads;
  const bool is_value = item / groups / heads % 2 != 0;
  const int64_t token = item / groups / heads / 2;

  Place place;
  if (!place_of(a.pages, a.slot_mapping[token], place)) return;

  float x[kNvFp4Group];
  const Rows& rows = is_value ? a.value : a.key;
  load_row(rows, token, head, static_cast<int>(group * kNvFp4Group), x);
  const float global_scale = is_value ? a.v_scale : a.k_scale;
  const NvFp4Block block = nvfp4_quantise(x, global_scale, a.four_over_six != 0);

  // A side holds the codes of all its heads and states, then their scales.
  const int64_t places = static_cast<int64_t>(a.pages.num_heads) * a.pages.block_size;
  uint8_t* const side = a.pages.data + place.block * a.pages.block_stride +
                        (is_value ? places * f.state_bytes() : 0);
  const int64_t at = head * a.pages.block_size + place.state;
  const int64_t codes_region = is_value ? f.v_codes_region() : f.k_codes_region();
  const int64_t codes_stride = is_value ? f.v_codes_stride() : f.k_codes_stride();
  const int64_t codes_offset = is_value ? f.v_codes_offset() : f.k_codes_offset();
  uint8_t* const codes = side + places * codes_region + at * codes_stride + codes_offset +
                         group * (kNvFp4Group / 2);
  put_aligned(codes, block.codes);
  const int64_t scales_region = is_value ? f.v_scales_region() : f.k_scales_region();
  const int64_t scales_stride = is_value ? f.v_scales_stride() : f.k_scales_stride();
  const int64_t scales_offset = is_value ? f.v_scales_offset() : f.k_scales_offset();
  const int64_t interleave = is_value ? f.v_scales_interleave() : f.k_scales_interleave();
  const int64_t scale =
      plane_offset(at, scales_offset + group, scales_stride, interleave);
  side[places * scales_region + scale] = static_cast<uint8_t>(block.scale);
}

VLLM_HOST_DEVICE void nvfp4_store_one(const NvFp4StoreArgs& a, uint32_t item) {
  if (a.linear != 0) {
    nvfp4_store_item<kv_formats::nvfp4_linear>(a, item);
  } else {
    nvfp4_store_item<kv_formats::nvfp4>(a, item);
  }
}

}  // namespace vllm_cuda
