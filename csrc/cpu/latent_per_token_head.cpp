// Latents as codes with one fp32 scale per token. 4-bit codes are of the rotated latent,
// and their scale's low bits hold the zero point: see per_token_head.py.
#include <string.h>

#include "../kv_formats.h"
#include "latent_format.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

constexpr uint32_t kZeroPoint = 15;
constexpr float kMinScale = 1e-6f;

VLLM_INLINE float float_at(const uint8_t* p) {
  float x;
  memcpy(&x, p, sizeof x);
  return x;
}

// Halves away from zero.
VLLM_INLINE float rounded(float x) {
  return __builtin_copysignf(__builtin_floorf(__builtin_fabsf(x) + 0.5f), x);
}

VLLM_INLINE uint32_t int8_code(float x) {
  const float whole = rounded(x);
  const float above = whole > -128.f ? whole : -128.f;
  return static_cast<uint32_t>(static_cast<int32_t>(above < 127.f ? above : 127.f));
}

// The scale of K, and an empty word where V's would be: a latent has no V.
template <class Format>
VLLM_INLINE void put_scale(uint8_t* cell, int size, float scale) {
  const Format format{size, 0};
  memcpy(cell + format.k_scale_offset(), &scale, sizeof scale);
  memset(cell + format.v_scale_offset(), 0, format.v_scale_bytes());
}

template <class Format, F (*kFloat)(Codes), uint32_t (*kCode)(float), int kLimit>
struct Bytes {
  template <int kDType>
  static void decode(const CodingArgs& a, const uint8_t* cell, void* row) {
    const F scale = set1(float_at(cell + Format{a.size, 0}.k_scale_offset()));
    for (int i = 0; i < a.size; i += kLanes) {
      put<kDType>(row, i, mul(kFloat(load_bytes(cell + i)), scale));
    }
  }
  static void encode(const CodingArgs& a, const float* __restrict x,
                     uint8_t* __restrict cell) {
    const int size = a.size;
    const float wanted = largest_size(x, size) / static_cast<float>(kLimit);
    const float scale = wanted > kMinScale ? wanted : kMinScale;
    const float factor = 1.f / scale;
    for (int i = 0; i < size; ++i) {
      cell[i] = static_cast<uint8_t>(kCode(finite(x[i]) * factor));
    }
    put_scale<Format>(cell, size, scale);
  }
  static int64_t cell_bytes(int size) { return Format{size, 0}.state_bytes(); }
  static constexpr LatentFormat format() {
    return {decode<kFloat32>, decode<kBFloat16>, encode, cell_bytes};
  }
};

// Rows are rotated already, and finite.
struct Nibbles {
  using Format = kv_formats::int4_per_token_head;
  static constexpr float kMaxCode = 15.f;

  VLLM_INLINE float clipped(float x) {
    const float above = x > 0.f ? x : 0.f;
    return above < kMaxCode ? above : kMaxCode;
  }

  static void encode(const CodingArgs& a, const float* __restrict x,
                     uint8_t* __restrict cell) {
    const int size = a.size;
    float low = 0.f;
    float high = 0.f;
    for (int i = 0; i < size; ++i) {
      low = x[i] < low ? x[i] : low;
      high = x[i] > high ? x[i] : high;
    }
    const float wanted = (high - low) / kMaxCode;
    const float scale = wanted > kMinScale ? wanted : kMinScale;
    const float zero = clipped(rounded(-low / scale));
    const float factor = 1.f / scale;
    for (int i = 0; i < size; i += 2) {
      const float even = clipped(rounded(x[i] * factor + zero));
      const float odd = clipped(rounded(x[i + 1] * factor + zero));
      cell[i / 2] = static_cast<uint8_t>(static_cast<int>(even) |
                                         static_cast<int>(odd) << 4);
    }
    uint32_t word;
    memcpy(&word, &scale, sizeof word);
    word = (word & ~kZeroPoint) | static_cast<uint32_t>(zero);
    float marked;
    memcpy(&marked, &word, sizeof marked);
    put_scale<Format>(cell, size, marked);
  }

  template <int kDType>
  static void decode(const CodingArgs& a, const uint8_t* cell, void* row) {
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
    return {decode<kFloat32>, decode<kBFloat16>, encode, cell_bytes};
  }
};

}  // namespace

const LatentFormat* per_token_head_latent(int32_t cell_format) {
  static constexpr LatentFormat with_int8 =
      Bytes<kv_formats::int8_per_token_head, int8, int8_code, 127>::format();
  static constexpr LatentFormat with_fp8 =
      Bytes<kv_formats::fp8_per_token_head, finite_e4m3, e4m3_code, 448>::format();
  static constexpr LatentFormat with_int4 = Nibbles::format();
  switch (cell_format) {
    case kLatentInt8PerToken: return &with_int8;
    case kLatentFp8PerToken: return &with_fp8;
    case kLatentInt4PerToken: return &with_int4;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
