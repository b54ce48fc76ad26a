// Latents as codes with one fp32 scale per token. 4-bit codes are of the rotated latent,
// and their scale's low bits hold the zero point: see per_token_head.py.
#include <string.h>

#include "../kv_formats.h"
#include "latent_decode.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

constexpr uint32_t kZeroPoint = 15;

VLLM_INLINE float float_at(const uint8_t* p) {
  float x;
  memcpy(&x, p, sizeof x);
  return x;
}

template <class Format, F (*kFloat)(Codes)>
struct Bytes {
  template <int kDType>
  static void decode(const DecodeArgs& a, const uint8_t* cell, void* row) {
    const F scale = set1(float_at(cell + Format{a.size, 0}.k_scale_offset()));
    for (int i = 0; i < a.size; i += kLanes) {
      put<kDType>(row, i, mul(kFloat(load_bytes(cell + i)), scale));
    }
  }
  static int64_t cell_bytes(int size) { return Format{size, 0}.state_bytes(); }
  static constexpr LatentFormat format() {
    return {decode<kFloat32>, decode<kBFloat16>, cell_bytes};
  }
};

struct Nibbles {
  using Format = kv_formats::int4_per_token_head;

  template <int kDType>
  static void decode(const DecodeArgs& a, const uint8_t* cell, void* row) {
    uint32_t word;
    memcpy(&word, cell + Format{a.size, 0}.k_scale_offset(), sizeof word);
    const F zero = set1(static_cast<float>(word & kZeroPoint));
    word &= ~kZeroPoint;
    float step;
    memcpy(&step, &word, sizeof step);
    for (int i = 0; i < a.size; i += kLanes) {
      const F code = uint4(load_nibbles(cell + i / 2));
      put<kDType>(row, i, mul(sub(code, zero), set1(step)));
    }
  }
  static int64_t cell_bytes(int size) { return Format{size, 0}.state_bytes(); }
  static constexpr LatentFormat format() {
    return {decode<kFloat32>, decode<kBFloat16>, cell_bytes};
  }
};

}  // namespace

const LatentFormat* per_token_head_latent(int32_t cell_format) {
  static constexpr LatentFormat with_int8 =
      Bytes<kv_formats::int8_per_token_head, int8>::format();
  static constexpr LatentFormat with_fp8 =
      Bytes<kv_formats::fp8_per_token_head, e4m3>::format();
  static constexpr LatentFormat with_int4 = Nibbles::format();
  switch (cell_format) {
    case kLatentInt8PerToken: return &with_int8;
    case kLatentFp8PerToken: return &with_fp8;
    case kLatentInt4PerToken: return &with_int4;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
