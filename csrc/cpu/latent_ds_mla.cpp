// DeepSeek's own records: e4m3 tiles with exact rope, and e2m1 groups with e4m3 rope.
#include <string.h>

#include "../kv_formats.h"
#include "latent_format.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

struct Tiles {
  static constexpr float kTiny = 0x1p-126f;
  static constexpr kv_formats::fp8_ds_mla kFormat{};
  static constexpr int kLatent = kFormat.nope_count();
  static constexpr int kTile = kLatent / kFormat.nope_scale_count();

  template <int kDType>
  static void decode(const CodingArgs&, const uint8_t* cell, void* row) {
    float scales[kFormat.nope_scale_count()];
    memcpy(scales, cell + kFormat.nope_scale_offset(), sizeof scales);
    for (int tile = 0; tile < kLatent; tile += kTile) {
      const F scale = set1(scales[tile / kTile]);
      for (int i = tile; i < tile + kTile; i += kLanes) {
        put<kDType>(row, i, mul(finite_e4m3(load_bytes(cell + i)), scale));
      }
    }
    const uint8_t* const rope = cell + kFormat.rope_offset();
    for (int i = 0; i < kFormat.rope_count(); i += kLanes) {
      put<kDType>(row, kLatent + i, load_as_float<kBFloat16>(rope + i * 2));
    }
  }
  static void encode(const CodingArgs& a, const float* __restrict x,
                     uint8_t* __restrict cell) {
    float scales[kFormat.nope_scale_count()];
    for (int tile = 0; tile < kLatent; tile += kTile) {
      const float wanted = largest_size(x + tile, kTile) / 448.f;
      const float scale = wanted > kTiny ? wanted : kTiny;
      for (int i = tile; i < tile + kTile; ++i) {
        cell[i] = static_cast<uint8_t>(e4m3_code(finite(x[i]) / scale));
      }
      scales[tile / kTile] = scale;
    }
    memcpy(cell + kFormat.nope_scale_offset(), scales, sizeof scales);
    uint8_t* const rope = cell + kFormat.rope_offset();
    const F limit = set1(a.dtype == kFloat32 ? 0x1.fep127f : __builtin_inff());
    for (int i = 0; i < kFormat.rope_count(); i += kLanes) {
      const F part = max(sub(set1(0.f), limit), min(limit, load(x + kLatent + i)));
      store_from_float<kBFloat16>(rope + i * 2, part);
    }
  }
  static int64_t cell_bytes(int) { return kFormat.state_bytes(); }
  static constexpr LatentFormat format() {
    return {decode<kFloat32>, decode<kBFloat16>, encode, cell_bytes};
  }
};

struct Groups {
  static constexpr kv_formats::nvfp4_ds_mla kFormat{};
  static constexpr int kLatent = kFormat.nope_count();
  static constexpr int kGroups = kFormat.nope_scale_count();
  static constexpr int kGroup = kLatent / kGroups;
  static constexpr int kColumns = 4;  // of the transposition that scales are stored in
  static constexpr float kMin = 0x1p-9f;  // the smallest scale

  static constexpr int place_of(int group) {
    return kGroups / kColumns * (group % kColumns) + group / kColumns;
  }

  template <int kDType>
  static void decode(const CodingArgs&, const uint8_t* cell, void* row) {
    const uint8_t* const stored = cell + kFormat.nope_scale_offset();
    float scales[kGroups];
    for (int i = 0; i < kGroups; i += kLanes) {
      store(scales + i, e4m3(load_bytes(stored + i)));
    }
    for (int group = 0; group < kGroups; ++group) {
      const F scale = set1(scales[place_of(group)]);
      for (int i = group * kGroup; i < (group + 1) * kGroup; i += kLanes) {
        put<kDType>(row, i, mul(e2m1(load_nibbles(cell + i / 2)), scale));
      }
    }
    const uint8_t* const rope = cell + kFormat.rope_offset();
    for (int i = 0; i < kFormat.rope_count(); i += kLanes) {
      put<kDType>(row, kLatent + i, e4m3(load_bytes(rope + i)));
    }
  }
  static void encode(const CodingArgs&, const float* __restrict x,
                     uint8_t* __restrict cell) {
    uint8_t codes[kGroups];
    for (int group = 0; group < kGroups; ++group) {
      const float wanted = largest_size(x + group * kGroup, kGroup) / 6.f;
      codes[group] = static_cast<uint8_t>(e4m3_code(wanted > kMin ? wanted : kMin));
    }
    float scales[kGroups];
    for (int i = 0; i < kGroups; i += kLanes) {
      store(scales + i, e4m3(load_bytes(codes + i)));
    }
    uint8_t* const stored = cell + kFormat.nope_scale_offset();
    for (int group = 0; group < kGroups; ++group) {
      const float factor = 1.f / scales[group];
      for (int i = group * kGroup; i < (group + 1) * kGroup; i += 2) {
        cell[i / 2] = static_cast<uint8_t>(e2m1_code(finite(x[i]) * factor) |
                                           e2m1_code(finite(x[i + 1]) * factor) << 4);
      }
      stored[place_of(group)] = codes[group];
    }
    uint8_t* const rope = cell + kFormat.rope_offset();
    for (int i = 0; i < kFormat.rope_count(); ++i) {
      rope[i] = static_cast<uint8_t>(e4m3_code(x[kLatent + i]));
    }
  }
  static int64_t cell_bytes(int) { return kFormat.state_bytes(); }
  static constexpr LatentFormat format() {
    return {decode<kFloat32>, decode<kBFloat16>, encode, cell_bytes};
  }
};

}  // namespace

const LatentFormat* ds_mla_latent(int32_t cell_format) {
  static constexpr LatentFormat tiles = Tiles::format();
  static constexpr LatentFormat groups = Groups::format();
  switch (cell_format) {
    case kLatentFp8DsMla: return &tiles;
    case kLatentNvFp4DsMla: return &groups;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
