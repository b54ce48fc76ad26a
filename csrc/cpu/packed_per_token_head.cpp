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
template <class Format, class Code>
struct ScaledPairs : PairCells<Bytes<Code>, Bytes<Code>> {
  using Base = PairCells<Bytes<Code>, Bytes<Code>>;
  static constexpr bool kKeyScales = true;
  static constexpr bool kValueScales = true;

  explicit ScaledPairs(const AttentionArgs& a)
      : Base(a, Format{a.query.size, a.out.size}.state_bytes(),
             Format{a.query.size, a.out.size}.v_offset(), {}),
        k_scale(Format{a.query.size, a.out.size}.k_scale_offset()),
        v_scale(Format{a.query.size, a.out.size}.v_scale_offset()) {}

  void load_numbers(const uint8_t* const* cells, int count, StateNumbers& n) const {
    for (int i = 0; i < count; ++i) {
      n.key_scale[i] = value_at<float>(cells[i] + k_scale);
      n.value_scale[i] = value_at<float>(cells[i] + v_scale);
    }
  }

  int64_t k_scale;
  int64_t v_scale;
};

// int8 cells as they are, four codes to a unit.
struct Int8Quads : PlainCells<Int8Units> {
  using Format = kv_formats::int8_per_token_head;
  using KeyUnits = Int8Units::Keys;
  using ValueUnits = Int8Units::Values;
  struct Tables {
    U first;   // the order of four states' bytes, for 16 elements and the 16 after
    U second;
  };
  static constexpr int kRegisterBytes = 64;
  static constexpr int kValueRegs = 2;
  static constexpr int kValueGroupBytes = 4 * 32;
  static constexpr int kFewRows = 4;
  static constexpr bool kKeyScales = true;
  static constexpr bool kValueScales = true;

  explicit Int8Quads(const AttentionArgs& a)
      : PlainCells(a, Format{a.query.size, a.out.size}.state_bytes()),
        format{a.query.size, a.out.size},
        value_offset(format.v_offset()) {
    alignas(64) uint8_t order[128];
    for (int i = 0; i < 128; ++i) {
      order[i] = static_cast<uint8_t>(i / 4 + i % 4 * 32);
    }
    orders = {_mm512_load_si512(order), _mm512_load_si512(order + 64)};
  }

  Tables tables() const { return orders; }

  __attribute__((always_inline)) U load_key(const uint8_t* cell, int elem,
                                            int count) const {
    return masked_bytes(cell + elem, count);
  }
  VLLM_INLINE void expand_key(const Tables&, U raw, U (&units)[1]) {
    units[0] = _mm512_xor_si512(raw, _mm512_set1_epi8(-128));
  }
  __attribute__((always_inline)) void load_values(const Tables& tables,
                                                  const uint8_t* const* cells, int elem,
                                                  int count, U (&r)[1][2]) const {
    const int64_t offset = value_offset + elem;
    const U low = both_halves(masked_half(cells[0] + offset, count),
                              masked_half(cells[1] + offset, count));
    const U high = both_halves(masked_half(cells[2] + offset, count),
                               masked_half(cells[3] + offset, count));
    r[0][0] = _mm512_permutex2var_epi8(low, tables.first, high);
    r[0][1] = _mm512_permutex2var_epi8(low, tables.second, high);
  }

  void load_numbers(const uint8_t* const* cells, int count, StateNumbers& n) const {
    const int64_t k_scale = format.k_scale_offset();
    const int64_t v_scale = format.v_scale_offset();
    for (int i = 0; i < count; ++i) {
      n.key_scale[i] = value_at<float>(cells[i] + k_scale);
      n.value_scale[i] = value_at<float>(cells[i] + v_scale);
    }
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
    int32_t sums[2] = {};
    for (int64_t i = 0; i < 4 * units; i += kLanes) {
      probe = fma(load(row + i), set1(0.f), probe);
      const U whole = _mm512_cvtps_epi32(mul(load(row + i), factor));
      const U upper = _mm512_srai_epi32(_mm512_add_epi32(whole, u_set1(64)), 7);
      const U lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
      sums[0] += _mm512_reduce_add_epi32(upper);
      sums[1] += _mm512_reduce_add_epi32(lower);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i),
                       _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(lower));
    }
    uint32_t* const rest = to + 2 * units;
    rest[0] = static_cast<uint32_t>(-128 * sums[0]);
    rest[1] = static_cast<uint32_t>(-128 * sums[1]);
    const float marked = scale + reduce_add(probe);
    memcpy(rest + 2, &marked, sizeof marked);
  }

  // Two parts of weighed probabilities; returns what a whole number stands for.
  float store_whole_probabilities(uint32_t* to, const float* p, int vectors) const {
    F largest = set1(0.f);
    for (int v = 0; v < vectors; ++v) largest = max(largest, load(p + v * kLanes));
    const float most = reduce_max(largest);
    if (!(most > 0x1p-100f)) {  // nothing is seen; or NaN, which stays
      memset(to, 0, 2 * kTileStates);
      return most == most ? 0.f : most;
    }
    const float step = most / ValueUnits::kMost;
    const F factor = set1(1.f / step);
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(to);
    for (int v = 0; v < vectors; ++v) {
      const U whole = _mm512_cvtps_epi32(mul(load(p + v * kLanes), factor));
      const __m128i high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + v * kLanes), high);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + kTileStates + v * kLanes),
                       _mm512_cvtepi32_epi8(whole));
    }
    return step;
  }

  Format format;
  int64_t value_offset;
  Tables orders;
};

struct Int4Pairs : PairCells<Nibbles<4>, Nibbles<4>> {
  using Base = PairCells<Nibbles<4>, Nibbles<4>>;
  static constexpr Centred<4> kCodes{};
  static constexpr bool kKeyScales = true;
  static constexpr bool kKeyBiases = true;
  static constexpr bool kValueScales = true;
  static constexpr bool kValueBiases = true;

  explicit Int4Pairs(const AttentionArgs& a)
      : Base(a, Int4{a.query.size, a.out.size}.state_bytes(),
             Int4{a.query.size, a.out.size}.v_offset(),
             {Nibbles<4>(kCodes.values, false), Nibbles<4>(kCodes.values, true)}),
        format{a.query.size, a.out.size},
        key_signs(a.key_table),
        value_signs(a.value_table) {}

  void load_numbers(const uint8_t* const* cells, int count, StateNumbers& n) const {
    const int64_t k_scale = format.k_scale_offset();
    const int64_t v_scale = format.v_scale_offset();
    for (int i = 0; i < count; ++i) {
      const ScaleWord key(cells[i] + k_scale);
      const ScaleWord value(cells[i] + v_scale);
      n.key_scale[i] = key.scale;
      n.key_bias[i] = kCodes.kCentre - key.zero;
      n.value_scale[i] = value.scale;
      n.value_bias[i] = (kCodes.kCentre - value.zero) * value.scale;
    }
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

  Int4 format;
  const float* key_signs;
  const float* value_signs;
};
#endif

template <class Format, F (*kFloat)(Codes), uint32_t (*kCode)(float), int kLimit>
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
    for (int i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(kCode(x[i] * factor));
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
    return {Rotation::kNone, page_run, 1, decode, encode, pairs};
  }
};

VLLM_INLINE uint32_t int8_code(float x) {
  return static_cast<uint32_t>(
      static_cast<int32_t>(clipped(round_away(x), -128.f, 127.f)));
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
    uint8_t codes[kMaxHead];
    for (int i = 0; i < size; ++i) {
      const float code = clipped(round_away(x[i] * factor + zero), 0.f, kMaxNibble);
      codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code));
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
    return {Rotation::kSigned, page_run, 1, decode, encode, pairs};
  }
};

}  // namespace

const PackedFormat* packed_per_token_head(int32_t cell_format) {
  using Int8 = kv_formats::int8_per_token_head;
  using E4M3 = kv_formats::fp8_per_token_head;
  static constexpr PackedFormat int8_format =
      Scaled<Int8, int8, int8_code, 127>::format(VLLM_PAIRS(Int8Quads));
  static constexpr PackedFormat e4m3_format =
      Scaled<E4M3, e4m3, e4m3_code, 448>::format(VLLM_PAIRS(ScaledPairs<E4M3, E4M3Bytes>));
  static constexpr PackedFormat int4_format = Rotated::format(VLLM_PAIRS(Int4Pairs));
  switch (cell_format) {
    case kCellsInt8PerTokenHead: return &int8_format;
    case kCellsFp8PerTokenHead: return &e4m3_format;
    case kCellsInt4PerTokenHead: return &int4_format;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
