// What the translation unit of a packed format gives: a state as rows of numbers, rows as
// a state, and attention in bf16 where the instruction set has it. Encoders do the torch
// format's operations one by one, to the same bytes.
#pragma once

#include <string.h>

#include "cells.h"
#include "narrow.h"
#include "turns.h"

namespace vllm_cpu::VLLM_ISA {

constexpr int kMaxHead = 1024;  // elements of K or of V

// A layer and the tables its format computes in torch.
struct PackedArgs {
  int size;                  // of K
  int size_v;
  float k_scale;             // per tensor
  float v_scale;
  const float* key_table;    // signs of the rotation, centroids, or midpoints to store
  const float* value_table;  // signs
  int dtype;                 // of the activations
  int num_heads;
  int block_size;
};

// place: head * block_size + state of the block.
struct State {
  const uint8_t* cell;
  const uint8_t* page;
  int64_t place;
};
struct MutableState {
  uint8_t* cell;
  uint8_t* page;
  int64_t place;
};

enum class Rotation { kNone, kSigned, kKeysOnly };

struct PackedFormat {
  Rotation rotation;
  PageRun (*page_run)(const PackedArgs&, const Pages&, int run);
  int num_runs;

  // float32 K and V as they are stored: per-tensor scales not applied, rotations kept.
  // Rows may be written up to a whole register past their size.
  void (*decode)(const PackedArgs&, const State&, float* key, float* value);

  // From float32 rows, 0 up to a whole register past their size; both are overwritten.
  void (*encode)(const PackedArgs&, const MutableState&, float* key, float* value);

  // Records of the sides one after another, and how they are dealt into tiles.
  void (*encode_record)(const PackedArgs&, uint8_t* record, float* key, float* value);
  TurnsOf (*turns)(const PackedArgs&);

  const AttentionKernel* pairs;  // over tiles, for bf16 queries; or null
};

// For formats whose states are records.
template <void (*kEncode)(const PackedArgs&, const MutableState&, float*, float*)>
static void encode_cell(const PackedArgs& a, uint8_t* record, float* key, float* value) {
  kEncode(a, {record, record, 0}, key, value);
}

static inline PackedArgs packed_args(const AttentionArgs& a) {
  return {a.query.size,  a.out.size,         a.k_scale,       a.v_scale,
          a.key_table,   a.value_table,      a.query.dtype,   a.pages.num_heads,
          a.pages.block_size};
}

// One record per state, `bytes` long.
static inline PageRun cell_run(const Pages& pages, int64_t bytes) {
  return {0, pages.head_stride, pages.state_stride, static_cast<int32_t>(bytes)};
}

template <class T>
VLLM_INLINE T value_at(const uint8_t* p) {
  T x;
  memcpy(&x, p, sizeof x);
  return x;
}

template <class T>
VLLM_INLINE void put_at(uint8_t* p, T x) {
  memcpy(p, &x, sizeof x);
}

VLLM_INLINE float half_at(const uint8_t* p) {
  alignas(16) uint16_t half[kLanes] = {};
  memcpy(half, p, 2);
  alignas(64) float out[kLanes];
  store(out, load_f16(half, 1));
  return out[0];
}

VLLM_INLINE void put_half(uint8_t* p, float x) {
  const float above = x > -65504.f ? x : -65504.f;
  store_f16(p, set1(above < 65504.f ? above : 65504.f), 1);
}

VLLM_INLINE F magnitude(F x) {
  return (F)((Codes)x & 0x7fffffffu);
}

// NaN as 0, and nothing past +-limit; whole registers.
VLLM_INLINE void make_finite(float* x, int count, float limit) {
  for (int i = 0; i < count; i += kLanes) {
    const F value = load(x + i);
    const F inside = min(max(value, set1(-limit)), set1(limit));
    const Codes is_number = (Codes)((Floats)value == (Floats)value);
    store(x + i, (F)((Codes)inside & is_number));
  }
}

// Rows are 0 past `count`.
VLLM_INLINE float largest_magnitude(const float* x, int count) {
  F largest = set1(0.f);
  for (int i = 0; i < count; i += kLanes) largest = max(largest, magnitude(load(x + i)));
  return reduce_max(largest);
}

// Smallest and largest of the first `count`, and of `start`.
VLLM_INLINE void range_of(const float* x, int count, float start, float& low,
                          float& high) {
  F least = set1(start);
  F most = set1(start);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    least = min(least, load(x + i));
    most = max(most, load(x + i));
  }
  low = 0.f - reduce_max(sub(set1(0.f), least));  // a zero is positive
  high = reduce_max(most);
  for (; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
}

VLLM_INLINE float clipped(float x, float low, float high) {
  const float above = x > low ? x : low;
  return above < high ? above : high;
}
VLLM_INLINE F clipped(F x, float low, float high) {
  return min(max(x, set1(low)), set1(high));
}

// Halves away from zero.
VLLM_INLINE float round_away(float x) {
  return __builtin_copysignf(__builtin_truncf(__builtin_fabsf(x) + 0.5f), x);
}

typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

// Towards zero, of |x| below 2^31.
VLLM_INLINE Ints whole_of(F x) { return __builtin_convertvector((Floats)x, Ints); }

// Halves away from zero, of |x| below 2^30.
VLLM_INLINE Ints rounded_away(F x) {
  const Codes sign = (Codes)x & 0x80000000u;
  return whole_of(add(x, (F)((Codes)set1(0.5f) | sign)));
}

// The low bytes of the first `count` numbers.
VLLM_INLINE void store_bytes(uint8_t* to, Ints x, int count) {
#if defined(__AVX512BF16__)
  _mm512_mask_cvtepi32_storeu_epi8(to, first_lanes(count), (U)x);
#else
  for (int i = 0; i < kLanes && i < count; ++i) to[i] = static_cast<uint8_t>(x[i]);
#endif
}

// Sum by halving, in casts.tree_sum's order; overwrites x.
VLLM_INLINE float tree_sum(float* x, int count) {
  if (count <= 0) return 0.f;
  while (count > 1) {
    const int half = count / 2;
    const float last = x[count - 1];
    for (int i = 0; i < half; ++i) x[i] += x[half + i];
    if (count % 2 != 0) x[0] += last;
    count = half;
  }
  return x[0];
}

// Codes below 2^kBits to a little-endian stream of bits; the last byte's rest is 0.
template <int kBits>
VLLM_INLINE void pack_codes(uint8_t* to, const uint8_t* codes, int count) {
  if (kBits == 4) {
    int i = 0;
#if defined(__AVX2__)
    const __m128i weights = _mm_set1_epi16(0x1001);
    for (; i + 16 <= count; i += 16) {
      const __m128i pair = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m128i bytes = _mm_maddubs_epi16(pair, weights);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i / 2),
                       _mm_packus_epi16(bytes, bytes));
    }
#endif
    for (; i + 1 < count; i += 2) {
      to[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
    }
    if (count % 2 != 0) to[count / 2] = codes[count - 1];
    return;
  }
  uint32_t bits = 0;
  int held = 0;
  for (int i = 0; i < count; ++i) {
    bits |= static_cast<uint32_t>(codes[i]) << held;
    held += kBits;
    if (held >= 8) {
      *to++ = static_cast<uint8_t>(bits);
      bits >>= 8;
      held -= 8;
    }
  }
  if (held > 0) *to = static_cast<uint8_t>(bits);
}

// table[code - kCentre...] is the caller's: codes as floats, `count` of them and no more
// bytes than hold them are read.
template <int kBits>
VLLM_INLINE void unpack_codes(float* to, const uint8_t* from, int count) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  for (int i = 0; i < count; ++i) {
    const int bit = i * kBits;
    uint32_t word = from[bit / 8];
    if (bit % 8 + kBits > 8) word |= static_cast<uint32_t>(from[bit / 8 + 1]) << 8;
    to[i] = static_cast<float>(word >> bit % 8 & kMask);
  }
}

// kLanes bytes as floats from element i of `size`; never reads past them.
template <F (*kFloat)(Codes)>
VLLM_INLINE void unpack_bytes(float* to, const uint8_t* from, int size) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, kFloat(load_bytes(from + i)));
  if (i == size) return;
  uint8_t rest[kLanes] = {};
  memcpy(rest, from + i, size - i);
  store(to + i, kFloat(load_bytes(rest)));
}

const PackedFormat* packed_fp8(int32_t cell_format);
const PackedFormat* packed_per_token_head(int32_t cell_format);
const PackedFormat* packed_nvfp4(int32_t cell_format);
const PackedFormat* packed_turboquant(int32_t cell_format);

}  // namespace vllm_cpu::VLLM_ISA
