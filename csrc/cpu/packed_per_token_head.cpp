// Codes with one fp32 scale per token, head and side. 4-bit codes are of rotated
// vectors, and their scale's low bits hold the zero point: see per_token_head.py.
#include "../kv_formats.h"
#include "attention_tile.h"
#include "packed.h"
#include "pairs.h"
#include "rotation.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

constexpr float kMinScale = 1e-6f;
constexpr uint32_t kZeroPoint = 15;
constexpr float kMaxNibble = 15.f;
constexpr float kInputLimit = 0x1p127f;
constexpr float kRotatedLimit = 0x1p112f;  // no sum of a head overflows

using Int4 = kv_formats::int4_per_token_head;

// A scale word without its zero point, and that.
struct ScaleWord {
  float scale;
  float zero;

  explicit ScaleWord(const uint8_t* p) {
    const uint32_t word = value_at<uint32_t>(p);
    const uint32_t bits = word & ~kZeroPoint;
    memcpy(&scale, &bits, sizeof scale);
    zero = static_cast<float>(word & kZeroPoint);
  }
};

#if defined(__AVX512BF16__)
// Where a scale of 16 states lies in their tile.
template <class Format>
struct ScalesAt {
  int64_t key;
  int64_t value;
  explicit ScalesAt(const Format& f)
      : key(kTurns * f.k_scale_region()), value(kTurns * f.v_scale_region()) {}
};

template <class Format, class Code>
struct ScaledPairs : PairCells<Bytes<Code>, Bytes<Code>> {
  using Base = PairCells<Bytes<Code>, Bytes<Code>>;
  static constexpr bool kKeyScales = true;
  static constexpr bool kValueScales = true;

  explicit ScaledPairs(const AttentionArgs& a)
      : ScaledPairs(a, Format{a.query.size, a.out.size}) {}
  ScaledPairs(const AttentionArgs& a, const Format& f)
      : Base(a, f.state_bytes(), f.v_region(), f.v_bytes(), {}), scales(f) {}

  void load_numbers(const uint8_t* tile, const uint8_t*, uint32_t keep, int v,
                    StateNumbers& n) const {
    store(n.key_scale + v * kLanes, turns_of_floats(tile + scales.key, keep));
    store(n.value_scale + v * kLanes, turns_of_floats(tile + scales.value, keep));
  }

  ScalesAt<Format> scales;
};

// Every second one of two registers, in order.
template <class T, int kCount>
struct EvenPlaces {
  alignas(64) T place[kCount];
  constexpr EvenPlaces() : place{} {
    for (int i = 0; i < kCount; ++i) place[i] = static_cast<T>(2 * i);
  }
};
constexpr EvenPlaces<uint8_t, 64> kEvenBytes;
constexpr EvenPlaces<uint16_t, 32> kEvenHalves;

// int8 codes as they are, four to a unit.
struct Int8Quads : TiledCells<Int8Units> {
  using Format = kv_formats::int8_per_token_head_tile16;
  using KeyUnits = Int8Units::Keys;
  using ValueUnits = Int8Units::Values;
  static_assert(Format{}.k_unit() == 4 && Format{}.v_interleave() == 4);
  static constexpr int kKeyBytes = 64;
  static constexpr int kValueRegs = 2;
  static constexpr int kRegsPerLoad = 1;
  static constexpr int kFewRows = 4;
  static constexpr bool kValuesFinite = true;
  static constexpr bool kKeyScales = true;
  static constexpr bool kValueScales = true;

  explicit Int8Quads(const AttentionArgs& a)
      : Int8Quads(a, Format{a.query.size, a.out.size}) {}
  Int8Quads(const AttentionArgs& a, const Format& f)
      : TiledCells(a, 1, f.state_bytes(), f.v_region(), f.v_bytes()), scales(f) {}

  VLLM_INLINE U load_keys(NoTables, const uint8_t* at) { return _mm512_loadu_si512(at); }
  VLLM_INLINE void expand_key(const Tables&, U raw, U (&units)[1]) {
    units[0] = _mm512_xor_si512(raw, _mm512_set1_epi8(-128));
  }
  template <int kRegs>
  __attribute__((always_inline)) void load_values(NoTables, const ValueGroup& group,
                                                  int elem, int count,
                                                  U (&r)[1][kRegs]) const {
#pragma GCC unroll 2
    for (int i = 0; i < kRegs; ++i) r[0][i] = value_units(group.codes, elem, count, i);
  }

  void load_numbers(const uint8_t* tile, const uint8_t*, uint32_t keep, int v,
                    StateNumbers& n) const {
    store(n.key_scale + v * kLanes, turns_of_floats(tile + scales.key, keep));
    store(n.value_scale + v * kLanes, turns_of_floats(tile + scales.value, keep));
  }

  // Two parts of `units` units; then what undoes the 128 of keys, and the scale.
  void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) const {
    alignas(64) float row[kMaxHead];
    load_floats(row, query, from, 4 * units);
    const float largest = largest_magnitude(row, static_cast<int>(4 * units));
    const float scale = largest > 0.f ? largest / KeyUnits::kMost : 1.f;
    const F factor = set1(1.f / scale);
    F probe = set1(0.f);  // becomes NaN with the query
    int8_t* const high = reinterpret_cast<int8_t*>(to);
    int8_t* const low = reinterpret_cast<int8_t*>(to + units);
    int32_t sum = 0;
    for (int64_t i = 0; i < 4 * units; i += kLanes) {
      probe = fma(load(row + i), set1(0.f), probe);
      const U whole = _mm512_cvtps_epi32(mul(load(row + i), factor));
      const U upper = _mm512_srai_epi32(_mm512_add_epi32(whole, u_set1(64)), 7);
      const U lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
      sum += _mm512_reduce_add_epi32(whole);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i),
                       _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(lower));
    }
    uint32_t* const rest = to + 2 * units;
    rest[0] = static_cast<uint32_t>(-128 * sum);
    const float marked = scale + reduce_add(probe);
    memcpy(rest + 1, &marked, sizeof marked);
  }

  // Two parts of a tile's weighed probabilities; returns what a whole number stands for.
  VLLM_INLINE float store_whole_probabilities(uint32_t* to, const F (&p)[4]) {
    const float most = reduce_max(max(max(p[0], p[1]), max(p[2], p[3])));
    if (!(most > 0x1p-100f)) {  // nothing is seen; or NaN, which stays
      memset(to, 0, 2 * kTileStates);
      return most == most ? 0.f : most;
    }
    const F factor = set1(ValueUnits::kMost / most);
    // The lowest 16 bits of 2^23 + x are those of x to the nearest whole.
    const F ones = set1(0x1p23f);
    const U first = low_halves(fma(p[0], factor, ones), fma(p[1], factor, ones));
    const U second = low_halves(fma(p[2], factor, ones), fma(p[3], factor, ones));
    const U even = _mm512_load_si512(kEvenBytes.place);
    const U odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
    u_store(to, _mm512_permutex2var_epi8(first, odd, second));
    u_store(to + kTileStates / 4, _mm512_permutex2var_epi8(first, even, second));
    return most * (1.f / ValueUnits::kMost);
  }

  VLLM_INLINE U low_halves(F low, F high) {
    const U places = _mm512_load_si512(kEvenHalves.place);
    return _mm512_permutex2var_epi16(as_units(low), places, as_units(high));
  }

  ScalesAt<Format> scales;
};

struct Int4Pairs : PairCells<Nibbles<4>, Nibbles<4>> {
  using Base = PairCells<Nibbles<4>, Nibbles<4>>;
  using Format = kv_formats::int4_per_token_head_tile16;
  static_assert(Format{}.k_unit() == 4 && Format{}.v_interleave() == 2);
  static constexpr Centred<4> kCodes{};
  static constexpr bool kKeyScales = true;
  static constexpr bool kKeyBiases = true;
  static constexpr bool kValueScales = true;
  static constexpr bool kValueBiases = true;

  explicit Int4Pairs(const AttentionArgs& a)
      : Int4Pairs(a, Format{a.query.size, a.out.size}) {}
  Int4Pairs(const AttentionArgs& a, const Format& f)
      : Base(a, f.state_bytes(), f.v_region(), f.v_bytes(),
             {Nibbles<4>(kCodes.values, false), Nibbles<4>(kCodes.values, true)}),
        scales(f),
        key_signs(a.key_table),
        value_signs(a.value_table) {}

  // A scale without its zero point, and what that adds to a code.
  VLLM_INLINE void parted(const uint8_t* at, uint32_t keep, F& scale, F& bias) {
    const U words = as_units(turns_of_floats(at, keep));
    const U zero = _mm512_and_si512(words, u_set1(kZeroPoint));
    scale = as_float(_mm512_andnot_si512(u_set1(kZeroPoint), words));
    bias = sub(set1(kCodes.kCentre), _mm512_cvtepi32_ps(zero));
  }
  void load_numbers(const uint8_t* tile, const uint8_t*, uint32_t keep, int v,
                    StateNumbers& n) const {
    F scale;
    F bias;
    parted(tile + scales.key, keep, scale, bias);
    store(n.key_scale + v * kLanes, scale);
    store(n.key_bias + v * kLanes, bias);
    parted(tile + scales.value, keep, scale, bias);
    store(n.value_scale + v * kLanes, scale);
    store(n.value_bias + v * kLanes, mul(bias, scale));
  }

  void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) const {
    alignas(64) float row[kMaxHead];
    load_floats(row, query, from, 2 * units);
    rotate_query_at_random(row, query.size, key_signs);
    pair_up<kKeyExpand>(to, row, units);
  }

  void finish(const float* acc, float bias, float* to) const {
    Base::finish(acc, bias, to);
    rotate_back(to, head_size_v, value_signs);
  }

  ScalesAt<Format> scales;
  const float* key_signs;
  const float* value_signs;
};
#endif

template <class Tiles>
TurnsOf scaled_turns(const PackedArgs& a) {
  const Tiles f{a.size, a.size_v};
  return {4, {VLLM_TURNS(f, k, 0), VLLM_TURNS(f, k_scale, 0), VLLM_TURNS(f, v, 0),
              VLLM_TURNS(f, v_scale, 0)}};
}

template <class Format, class Tiles, F (*kFloat)(Codes),
          void (*kCodes)(uint8_t*, const float*, int, float), int kLimit>
struct Scaled {
  static PageRun page_run(const PackedArgs& a, const Pages& pages, int) {
    return cell_run(pages, Format{a.size, a.size_v}.state_bytes());
  }

  static void decode_side(float* to, const uint8_t* codes, int size,
                          const uint8_t* scale) {
    unpack_bytes<kFloat>(to, codes, size);
    const F factor = set1(value_at<float>(scale));
    for (int i = 0; i < size; i += kLanes) store(to + i, mul(load(to + i), factor));
  }
  static void decode(const PackedArgs& a, const State& state, float* key, float* value) {
    const Format f{a.size, a.size_v};
    decode_side(key, state.cell + f.k_offset(), a.size, state.cell + f.k_scale_offset());
    decode_side(value, state.cell + f.v_offset(), a.size_v,
                state.cell + f.v_scale_offset());
  }

  static void encode_side(uint8_t* to, float* x, int size, uint8_t* scale_word) {
    make_finite(x, size, kInputLimit);
    const float wanted = largest_magnitude(x, size) / static_cast<float>(kLimit);
    const float scale = wanted > kMinScale ? wanted : kMinScale;
    const float factor = 1.f / scale;
    kCodes(to, x, size, factor);
    put_at(scale_word, scale);
  }
  static void encode(const PackedArgs& a, const MutableState& state, float* key,
                     float* value) {
    const Format f{a.size, a.size_v};
    encode_side(state.cell + f.k_offset(), key, a.size, state.cell + f.k_scale_offset());
    encode_side(state.cell + f.v_offset(), value, a.size_v,
                state.cell + f.v_scale_offset());
  }

  static constexpr PackedFormat format(const AttentionKernel* pairs) {
    return {Rotation::kNone,      page_run,            1,    decode, encode,
            encode_cell<encode>, scaled_turns<Tiles>, pairs};
  }
};

VLLM_INLINE void int8_codes(uint8_t* to, const float* x, int size, float factor) {
  for (int i = 0; i < size; i += kLanes) {
    const F code = clipped(mul(load(x + i), set1(factor)), -128.f, 127.f);
    store_bytes(to + i, rounded_away(code), size - i);
  }
}

VLLM_INLINE void e4m3_codes(uint8_t* to, const float* x, int size, float factor) {
  for (int i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(e4m3_code(x[i] * factor));
}

struct Rotated {
  static PageRun page_run(const PackedArgs& a, const Pages& pages, int) {
    return cell_run(pages, Int4{a.size, a.size_v}.state_bytes());
  }

  static void decode_side(float* to, const uint8_t* codes, int size,
                          const uint8_t* scale) {
    const ScaleWord word(scale);
    unpack_codes<4>(to, codes, size);
    const F zero = set1(word.zero);
    const F step = set1(word.scale);
    for (int i = 0; i < size; i += kLanes) {
      store(to + i, mul(sub(load(to + i), zero), step));
    }
  }
  static void decode(const PackedArgs& a, const State& state, float* key, float* value) {
    const Int4 f{a.size, a.size_v};
    decode_side(key, state.cell + f.k_offset(), a.size, state.cell + f.k_scale_offset());
    decode_side(value, state.cell + f.v_offset(), a.size_v,
                state.cell + f.v_scale_offset());
  }

  // To the activations' type and back, as the format does before it quantises.
  static void round_to(float* x, int size, int dtype) {
    for (int i = 0; i < size && dtype == kBFloat16; i += kLanes) {
      uint16_t part[kLanes];
      store_bf16(part, min(max(load(x + i), set1(-0x1.fep127f)), set1(0x1.fep127f)),
                 kLanes);
      store(x + i, load_bf16(part, kLanes));
    }
    for (int i = 0; i < size && dtype == kFloat16; i += kLanes) {
      uint16_t part[kLanes];
      store_f16(part, min(max(load(x + i), set1(-65504.f)), set1(65504.f)), kLanes);
      store(x + i, load_f16(part, kLanes));
    }
  }

  static void encode_side(uint8_t* to, float* x, int size, uint8_t* scale_word,
                          const float* signs, int dtype) {
    make_finite(x, size, kRotatedLimit);
    scale_by(x, size, signs);
    hadamard(x, size);
    round_to(x, size, dtype);
    float low;
    float high;
    range_of(x, size, 0.f, low, high);
    const float wanted = (high - low) / kMaxNibble;
    const float scale = wanted > kMinScale ? wanted : kMinScale;
    const float zero = clipped(round_away(-low / scale), 0.f, kMaxNibble);
    const float factor = 1.f / scale;
    alignas(64) uint8_t codes[kMaxHead];
    for (int i = 0; i < size; i += kLanes) {
      const F code = add(mul(load(x + i), set1(factor)), set1(zero));
      store_bytes(codes + i, rounded_away(clipped(code, 0.f, kMaxNibble)), size - i);
    }
    pack_codes<4>(to, codes, size);
    uint32_t word;
    memcpy(&word, &scale, sizeof word);
    put_at(scale_word, (word & ~kZeroPoint) | static_cast<uint32_t>(zero));
  }
  static void encode(const PackedArgs& a, const MutableState& state, float* key,
                     float* value) {
    const Int4 f{a.size, a.size_v};
    encode_side(state.cell + f.k_offset(), key, a.size, state.cell + f.k_scale_offset(),
                a.key_table, a.dtype);
    encode_side(state.cell + f.v_offset(), value, a.size_v,
                state.cell + f.v_scale_offset(), a.value_table, a.dtype);
  }

  static constexpr PackedFormat format(const AttentionKernel* pairs) {
    using Tiles = kv_formats::int4_per_token_head_tile16;
    return {Rotation::kSigned,    page_run,            1,    decode, encode,
            encode_cell<encode>, scaled_turns<Tiles>, pairs};
  }
};

}  // namespace

const PackedFormat* packed_per_token_head(int32_t cell_format) {
  using Int8 = kv_formats::int8_per_token_head;
  using E4M3 = kv_formats::fp8_per_token_head;
  using Int8Tiles = kv_formats::int8_per_token_head_tile16;
  using E4M3Tiles = kv_formats::fp8_per_token_head_tile16;
  static constexpr PackedFormat int8_format =
      Scaled<Int8, Int8Tiles, int8, int8_codes, 127>::format(VLLM_PAIRS(Int8Quads));
  static constexpr PackedFormat e4m3_format =
      Scaled<E4M3, E4M3Tiles, e4m3, e4m3_codes, 448>::format(
          VLLM_PAIRS(ScaledPairs<E4M3Tiles, E4M3Bytes>));
  static constexpr PackedFormat int4_format = Rotated::format(VLLM_PAIRS(Int4Pairs));
  switch (cell_format) {
    case kCellsInt8PerTokenHead: return &int8_format;
    case kCellsFp8PerTokenHead: return &e4m3_format;
    case kCellsInt4PerTokenHead: return &int4_format;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
