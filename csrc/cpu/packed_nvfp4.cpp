// e2m1 codes in groups of 16 with an e4m3 scale each. A page holds K codes, K scales,
// V codes and V scales, each through all heads; V scales interleave four states.
#include "../kv_formats.h"
#include "attention_tile.h"
#include "packed.h"
#include "pairs.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

using Format = kv_formats::nvfp4;

constexpr int kGroup = 16;
constexpr int kInterleaved = Format{kGroup, kGroup}.v_scales_interleave();
constexpr float kInputLimit = 0x1p58f;  // squared errors of a group stay finite
constexpr float kSixth = static_cast<float>(1.0 / 6.0);
constexpr float kQuarter = 0.25f;

// Where the four parts of a page begin, and what a place takes in each.
struct Parts {
  int64_t k_codes, k_scales, v_codes, v_scales;
  int64_t codes_stride, scales_stride;

  Parts(const PackedArgs& a) {
    const Format f{a.size, a.size_v};
    const int64_t places = static_cast<int64_t>(a.num_heads) * a.block_size;
    const int64_t side = places * f.state_bytes();
    k_codes = places * f.k_codes_region() + f.k_codes_offset();
    k_scales = places * f.k_scales_region() + f.k_scales_offset();
    v_codes = side + places * f.v_codes_region() + f.v_codes_offset();
    v_scales = side + places * f.v_scales_region() + f.v_scales_offset();
    codes_stride = f.k_codes_stride();
    scales_stride = f.k_scales_stride();
  }

  // The scales of the states around `place` whose bytes alternate.
  int64_t v_scales_of(int64_t place) const {
    return v_scales + place / kInterleaved * kInterleaved * scales_stride;
  }
};

PageRun part_run(const PackedArgs& a, const Pages&, int run) {
  const Parts parts(a);
  const bool is_codes = run % 2 == 0;
  const int64_t bases[] = {parts.k_codes, parts.k_scales, parts.v_codes, parts.v_scales};
  const int64_t stride = is_codes ? parts.codes_stride : parts.scales_stride;
  return {bases[run], a.block_size * stride, stride, static_cast<int32_t>(stride)};
}

constexpr int kRuns = 4;

#if defined(__AVX512BF16__)
struct E2M1Codes {
  uint16_t values[16];
  constexpr explicit E2M1Codes(int exponent) : values{} {
    constexpr int kHalves[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int code = 0; code < 16; ++code) {
      values[code] = static_cast<uint16_t>(exact_bfloat16(kHalves[code & 7], exponent - 1) |
                                           (code & 8) << 12);
    }
  }
};

// Codes and scales in tiles. The values' codes stand for 2^120 times themselves, which
// the bits of an e4m3 scale, moved to where a float has its exponent, take away again.
struct Pairs : TiledCells<BFloat16Units> {
  using Tiles = kv_formats::nvfp4_tile16;
  static_assert(Tiles{}.k_codes_unit() == 4 && Tiles{}.v_codes_interleave() == 2);
  static_assert(Tiles{}.k_scales_unit() == 1 && Tiles{}.v_scales_interleave() == kTurns);
  struct Tables {
    Nibbles<4> key;
    Nibbles<4> value;
  };
  static constexpr int kScaleBias = 120;
  static constexpr E2M1Codes kKeyCodes{0};
  static constexpr E2M1Codes kValueCodes{kScaleBias};
  static constexpr int kKeyBytes = Nibbles<4>::kKeyBytes;
  static constexpr int kKeyExpand = 4;
  static constexpr int kKeyGroup = kGroup / 8;  // raw units of eight codes
  static constexpr int kValueDots = 2;
  static constexpr int kValueRegs = 4;
  static constexpr int kGroupBytes = 2 * Nibbles<4>::kGroupBytes;
  static constexpr int kRegsPerLoad = 4;
  static constexpr int kFewRows = 4;
  static constexpr bool kValuesInOrder = false;
  static constexpr bool kValuesFinite = true;
  static constexpr bool kFinishes = true;

  explicit Pairs(const AttentionArgs& a) : Pairs(a, Tiles{a.query.size, a.out.size}) {}
  Pairs(const AttentionArgs& a, const Tiles& f)
      : TiledCells(a, 2, f.state_bytes(), f.v_codes_region(), f.v_codes_bytes()),
        head_size(a.query.size),
        key_scales_at(kTurns * f.k_scales_region()),
        value_scales_at(kTurns * f.v_scales_region()),
        coded{Nibbles<4>(kKeyCodes.values, false), Nibbles<4>(kValueCodes.values, true)} {
  }

  static int64_t finish_floats(const AttentionArgs& a) {
    return round_up(a.out.size, 64);
  }
  Tables tables() const { return coded; }

  __attribute__((always_inline)) U load_keys(const Tables& tables,
                                             const uint8_t* at) const {
    return tables.key.load_keys(at);
  }
  VLLM_INLINE void expand_key(const Tables& tables, U raw, U (&units)[4]) {
    tables.key.expand(raw, units);
  }

  // Scales are neither negative nor NaN; other bytes, of states never written, give
  // something finite.
  __attribute__((always_inline)) F key_scales(const uint8_t* tile, int group) const {
    const U bytes = (U)load_bytes(tile + key_scales_at + group * kTurns);
    return mul(as_float(_mm512_slli_epi32(bytes, 20)), set1(0x1p120f));
  }

  // Products of codes and scales have few bits: exact in bf16.
  VLLM_INLINE U scaled(U pair, F low, F high) {
    const U a = as_units(mul(as_float(_mm512_slli_epi32(pair, 16)), low));
    const U upper = _mm512_and_si512(pair, u_set1(0xffff0000u));
    const U b = as_units(mul(as_float(upper), high));
    const U halves = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);  // upper to lower
    return _mm512_mask_shuffle_epi8(b, 0x3333333333333333ull, a, halves);
  }

  // Of four groups of elements, a state's scale: each to the four lanes of its words.
  VLLM_INLINE F spread(U scales, int turn) {
    const U order = _mm512_setr_epi32(0, 0, 0, 0, 16, 16, 16, 16, 32, 32, 32, 32, 48, 48,
                                      48, 48);
    const U from = _mm512_slli_epi32(_mm512_add_epi32(order, u_set1(turn)), 16);
    const __mmask64 third = 0x4444444444444444ull;
    return as_float(
        _mm512_slli_epi32(_mm512_maskz_permutexvar_epi8(third, from, scales), 4));
  }

  template <int kRegs>
  __attribute__((always_inline)) void load_values(const Tables& tables,
                                                  const ValueGroup& group, int elem,
                                                  int count, U (&r)[2][kRegs]) const {
    const U scales = masked_bytes(group.tile + value_scales_at + elem / kGroup * kTurns,
                                  count / kGroup * kTurns);
#pragma GCC unroll 2
    for (int d = 0; d < 2; ++d) {
      const uint8_t* const codes = group.codes + 2 * d * value_bytes;
      U pair[4];
      tables.value.expand(tables.value.value_words(codes, elem, count), pair);
      const F low = spread(scales, group.turn + 2 * d);
      const F high = spread(scales, group.turn + 2 * d + 1);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) r[d][i] = scaled(pair[i], low, high);
    }
  }

  void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) const {
    alignas(64) float row[kMaxHead];
    load_floats(row, query, from, 2 * units);
    pair_up<kKeyExpand>(to, row, units);
  }

  void finish(const float* acc, float bias, float* to) const {
    put_in_order(to, acc, head_size, bias);
  }

  int head_size;
  int64_t key_scales_at;
  int64_t value_scales_at;
  Tables coded;
};
#endif

void decode_groups(float* to, const uint8_t* codes, int size, const uint8_t* scales,
                   int step) {
  for (int group = 0; group < size / kGroup; ++group) {
    float scale[kLanes];
    store(scale, e4m3(Codes{} + scales[group * step]));
    const F factor = set1(scale[0]);
    for (int i = group * kGroup; i < (group + 1) * kGroup; i += kLanes) {
      store(to + i, mul(e2m1(load_nibbles(codes + i / 2)), factor));
    }
  }
}

void decode(const PackedArgs& a, const State& state, float* key, float* value) {
  const Parts parts(a);
  const int64_t place = state.place;
  const uint8_t* const page = state.page;
  decode_groups(key, page + parts.k_codes + place * parts.codes_stride, a.size,
                page + parts.k_scales + place * parts.scales_stride, 1);
  decode_groups(value, page + parts.v_codes + place * parts.codes_stride, a.size_v,
                page + parts.v_scales_of(place) + place % kInterleaved, kInterleaved);
}

constexpr int kMaxGroups = kMaxHead / kGroup;
static_assert(kMaxGroups % kLanes == 0);

// The e4m3 scales of a head's groups, and what they stand for with the layer's scale.
struct Scales {
  alignas(64) uint32_t code[kMaxGroups];
  alignas(64) float step[kMaxGroups];
  alignas(64) float inverse[kMaxGroups];  // 0 where the step is

  // Of groups whose largest magnitudes are given, in whole registers.
  Scales(const float* largest, int groups, float reciprocal, float global_scale) {
    const F global = set1(global_scale);
    for (int i = 0; i < groups; i += kLanes) {
      const F wanted = div(mul(load(largest + i), set1(reciprocal)), global);
      const Codes codes = e4m3_codes(wanted);
      const F steps = mul(e4m3(codes), global);
      const Codes is_positive = (Codes)((Floats)steps > 0.f);
      memcpy(code + i, &codes, sizeof codes);
      store(step + i, steps);
      store(inverse + i, (F)((Codes)div(set1(1.f), steps) & is_positive));
    }
  }
};

// The codes of a group.
struct GroupCodes {
  Codes part[kGroup / kLanes];

  GroupCodes(const float* x, float inverse) {
    for (int i = 0; i < kGroup / kLanes; ++i) {
      part[i] = e2m1_codes(mul(load(x + i * kLanes), set1(inverse)));
    }
  }

  float error_of(const float* x, float step) const {
    alignas(64) float squares[kGroup];
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const F off = sub(mul(e2m1(part[i]), set1(step)), load(x + i * kLanes));
      store(squares + i * kLanes, mul(off, off));
    }
    return tree_sum(squares, kGroup);
  }

  void pack(uint8_t* to) const {
    alignas(16) uint8_t codes[kGroup];
    for (int i = 0; i < kGroup / kLanes; ++i) {
      store_bytes(codes + i * kLanes, (Ints)part[i], kLanes);
    }
    pack_codes<4>(to, codes, kGroup);
  }
};

template <bool kFourOverSix>
void encode_side(uint8_t* codes, uint8_t* scales, int step, float* x, int size,
                 float global_scale) {
  make_finite(x, size, kInputLimit);
  const int groups = size / kGroup;
  alignas(64) float largest[kMaxGroups];
  for (int group = 0; group < groups; ++group) {
    largest[group] = largest_magnitude(x + group * kGroup, kGroup);
  }
  for (int i = groups; i < round_up(groups, kLanes); ++i) largest[i] = 0.f;
  const Scales six(largest, groups, kSixth, global_scale);
  const Scales four(largest, kFourOverSix ? groups : 0, kQuarter, global_scale);
  for (int group = 0; group < groups; ++group) {
    const float* const from = x + group * kGroup;
    uint32_t scale = six.code[group];
    GroupCodes best(from, six.inverse[group]);
    if (kFourOverSix) {
      const GroupCodes other(from, four.inverse[group]);
      if (other.error_of(from, four.step[group]) <
          best.error_of(from, six.step[group])) {
        best = other;
        scale = four.code[group];
      }
    }
    best.pack(codes + group * kGroup / 2);
    scales[group * step] = static_cast<uint8_t>(scale);
  }
}

template <bool kFourOverSix>
void encode(const PackedArgs& a, const MutableState& state, float* key, float* value) {
  const Parts parts(a);
  const int64_t place = state.place;
  uint8_t* const page = state.page;
  encode_side<kFourOverSix>(page + parts.k_codes + place * parts.codes_stride,
                            page + parts.k_scales + place * parts.scales_stride, 1, key,
                            a.size, a.k_scale);
  encode_side<kFourOverSix>(page + parts.v_codes + place * parts.codes_stride,
                            page + parts.v_scales_of(place) + place % kInterleaved,
                            kInterleaved, value, a.size_v, a.v_scale);
}

// Codes then scales of K, and of V.
template <bool kFourOverSix>
void encode_record(const PackedArgs& a, uint8_t* record, float* key, float* value) {
  const kv_formats::nvfp4_tile16 f{a.size, a.size_v};
  uint8_t* const v = record + f.state_bytes();
  encode_side<kFourOverSix>(record + f.k_codes_region(), record + f.k_scales_region(), 1,
                            key, a.size, a.k_scale);
  encode_side<kFourOverSix>(v + f.v_codes_region(), v + f.v_scales_region(), 1, value,
                            a.size_v, a.v_scale);
}

TurnsOf turns(const PackedArgs& a) {
  const kv_formats::nvfp4_tile16 f{a.size, a.size_v};
  return {4, {VLLM_TURNS(f, k_codes, 0), VLLM_TURNS(f, k_scales, 0),
              VLLM_TURNS(f, v_codes, 1), VLLM_TURNS(f, v_scales, 1)}};
}

template <bool kFourOverSix>
constexpr PackedFormat format_of(const AttentionKernel* pairs) {
  return {Rotation::kNone,        part_run, kRuns, decode, encode<kFourOverSix>,
          encode_record<kFourOverSix>, turns,    pairs};
}

}  // namespace

const PackedFormat* packed_nvfp4(int32_t cell_format) {
  static constexpr const AttentionKernel* pairs = VLLM_PAIRS(Pairs);
  static constexpr PackedFormat plain = format_of<false>(pairs);
  static constexpr PackedFormat four_over_six = format_of<true>(pairs);
  switch (cell_format) {
    case kPagesNvFp4: return &plain;
    case kPagesNvFp4FourOverSix: return &four_over_six;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
