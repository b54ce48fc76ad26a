// DeepSeek's own records: e4m3 tiles with exact rope, and e2m1 groups with e4m3 rope.
#include <string.h>

#include "../kv_formats.h"
#include "latent_decode.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

struct Tiles {
  using Record = kv_formats::fp8_ds_mla_record;
  static constexpr kv_formats::fp8_ds_mla kFormat{};
  static constexpr int kLatent = kFormat.nope_count();
  static constexpr int kTile = kLatent / kFormat.nope_scale_count();

  template <int kDType>
  static void decode(const DecodeArgs&, const uint8_t* cell, void* row) {
    float scales[kFormat.nope_scale_count()];
    memcpy(scales, cell + kFormat.nope_scale_offset(), sizeof scales);
    for (int tile = 0; tile < kLatent; tile += kTile) {
      const F scale = set1(scales[tile / kTile]);
      for (int i = tile; i < tile + kTile; i += kLanes) {
        put<kDType>(row, i, mul(e4m3(load_bytes(cell + i)), scale));
      }
    }
    const uint8_t* const rope = cell + kFormat.rope_offset();
    for (int i = 0; i < kFormat.rope_count(); i += kLanes) {
      put<kDType>(row, kLatent + i, load_as_float<kBFloat16>(rope + i * 2));
    }
  }
  static int64_t cell_bytes(int) { return kFormat.state_bytes(); }
  static constexpr LatentFormat format() {
    return {decode<kFloat32>, decode<kBFloat16>, cell_bytes};
  }
};

struct Groups {
  static constexpr kv_formats::nvfp4_ds_mla kFormat{};
  static constexpr int kLatent = kFormat.nope_count();
  static constexpr int kGroups = kFormat.nope_scale_count();
  static constexpr int kGroup = kLatent / kGroups;
  static constexpr int kColumns = 4;  // of the transposition that scales are stored in

  template <int kDType>
  static void decode(const DecodeArgs&, const uint8_t* cell, void* row) {
    const uint8_t* const stored = cell + kFormat.nope_scale_offset();
    float scales[kGroups];
    for (int i = 0; i < kGroups; i += kLanes) {
      store(scales + i, e4m3(load_bytes(stored + i)));
    }
    for (int group = 0; group < kGroups; ++group) {
      const int place = kGroups / kColumns * (group % kColumns) + group / kColumns;
      const F scale = set1(scales[place]);
      for (int i = group * kGroup; i < (group + 1) * kGroup; i += kLanes) {
        put<kDType>(row, i, mul(e2m1(load_nibbles(cell + i / 2)), scale));
      }
    }
    const uint8_t* const rope = cell + kFormat.rope_offset();
    for (int i = 0; i < kFormat.rope_count(); i += kLanes) {
      put<kDType>(row, kLatent + i, e4m3(load_bytes(rope + i)));
    }
  }
  static int64_t cell_bytes(int) { return kFormat.state_bytes(); }
  static constexpr LatentFormat format() {
    return {decode<kFloat32>, decode<kBFloat16>, cell_bytes};
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
