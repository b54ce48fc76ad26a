// Codes of 8, 4 and 3 bits as bf16 pairs, by permutes as look-up tables. AVX-512 with
// VBMI and BF16 only.
//
// Every way starts from raw registers whose 32-bit lanes hold whole codes: of one state
// (keys) or of neighbouring states (values), as tiles of the cache hold them. A lane's
// codes come out of the lower and the upper half of it together, so a pair holds codes
// that lie half a lane apart.
#pragma once

#if defined(__AVX512BF16__)

#include "cells.h"

namespace vllm_cpu::VLLM_ISA {

VLLM_INLINE U masked_bytes(const uint8_t* p, int count) {
  const __mmask64 keep = count >= 64 ? ~0ull : (1ull << count) - 1;
  return _mm512_maskz_loadu_epi8(keep, p);
}
// Register i of a group's 32-bit units from element `elem` on, of `count`.
VLLM_INLINE U value_units(const uint8_t* group, int elem, int count, int i) {
  const uint8_t* const at = group + elem * 4 + i * 64;
  if (count >= (i + 1) * kLanes) return _mm512_loadu_si512(at);
  return masked_bytes(at, static_cast<int>(larger(count - i * kLanes, 0)) * 4);
}

// Numbers that 16 states have one of, with those of unseen states as 0.
VLLM_INLINE F turns_of_floats(const uint8_t* at, uint32_t keep) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(keep), at);
}
VLLM_INLINE F turns_of_halves(const uint8_t* at, uint32_t keep) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(keep), at));
}

// Round to nearest even, for numbers that are neither NaN nor too large.
VLLM_INLINE uint16_t bfloat16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The head that starts at element `from` of the query's rows, as floats, 0 up to `room`.
static void load_floats(float* to, const Rows& query, int64_t from, int64_t room) {
  const uint8_t* const data =
      static_cast<const uint8_t*>(query.data) + from * dtype_bytes(query.dtype);
  for (int64_t i = 0; i < room; i += kLanes) {
    const int left = static_cast<int>(larger(query.size - i, 0));
    F x;
    switch (query.dtype) {
      case kFloat32: x = load_as_float<kFloat32>(data + i * 4, left); break;
      case kFloat16: x = load_as_float<kFloat16>(data + i * 2, left); break;
      default: x = load_as_float<kBFloat16>(data + i * 2, left); break;
    }
    store(to + i, x);
  }
}

// Which words of 32 become the pairs of raw units that expand to kExpand registers.
template <int kExpand>
struct PairPlaces {
  alignas(64) uint16_t place[32];
  constexpr PairPlaces() : place{} {
    for (int unit = 0; unit < kLanes; ++unit) {
      const int first = unit / kExpand * (2 * kExpand) + unit % kExpand;
      place[2 * unit] = static_cast<uint16_t>(first);
      place[2 * unit + 1] = static_cast<uint16_t>(first + kExpand);
    }
  }
};
template <int kExpand>
constexpr PairPlaces<kExpand> kPairPlaces;

// Floats in order to those pairs; whole registers.
template <int kExpand>
static void pair_up(uint32_t* to, const float* from, int64_t units) {
  static_assert(kLanes % kExpand == 0);
  const U places = _mm512_load_si512(kPairPlaces<kExpand>.place);
  for (int64_t unit = 0; unit < units; unit += kLanes) {
    const U words =
        (U)_mm512_cvtne2ps_pbh(load(from + 2 * unit + kLanes), load(from + 2 * unit));
    u_store(to + unit, _mm512_permutexvar_epi16(places, words));
  }
}

VLLM_INLINE F unpack_low_pairs(F a, F b) {
  return _mm512_castpd_ps(
      _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
VLLM_INLINE F unpack_high_pairs(F a, F b) {
  return _mm512_castpd_ps(
      _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

// From blocks of four registers, each of every fourth element, to elements in order; a
// number is added to each.
static void put_in_order(float* to, const float* from, int size, float bias) {
  const F plus = set1(bias);
  for (int block = 0; block < size; block += 4 * kLanes) {
    F r[4];
    for (int i = 0; i < 4; ++i) r[i] = add(load(from + block + i * kLanes), plus);
    const F low01 = _mm512_unpacklo_ps(r[0], r[1]);
    const F high01 = _mm512_unpackhi_ps(r[0], r[1]);
    const F low23 = _mm512_unpacklo_ps(r[2], r[3]);
    const F high23 = _mm512_unpackhi_ps(r[2], r[3]);
    // Quarter q of register i: elements from 4 * (4 q + i) on.
    const F fours[4] = {unpack_low_pairs(low01, low23), unpack_high_pairs(low01, low23),
                        unpack_low_pairs(high01, high23),
                        unpack_high_pairs(high01, high23)};
    const F front01 = _mm512_shuffle_f32x4(fours[0], fours[1], 0x44);
    const F back01 = _mm512_shuffle_f32x4(fours[0], fours[1], 0xee);
    const F front23 = _mm512_shuffle_f32x4(fours[2], fours[3], 0x44);
    const F back23 = _mm512_shuffle_f32x4(fours[2], fours[3], 0xee);
    store(to + block, _mm512_shuffle_f32x4(front01, front23, 0x88));
    store(to + block + kLanes, _mm512_shuffle_f32x4(front01, front23, 0xdd));
    store(to + block + 2 * kLanes, _mm512_shuffle_f32x4(back01, back23, 0x88));
    store(to + block + 3 * kLanes, _mm512_shuffle_f32x4(back01, back23, 0xdd));
  }
}

// bf16 of the magnitudes of 8-bit codes, whose highest bit is the sign.
struct ByteTable {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

// bf16 bits of m * 2^e for whole m below 256.
constexpr uint16_t exact_bfloat16(int m, int e) {
  if (m == 0) return 0;
  int top = 7;
  while ((m >> top & 1) == 0) --top;
  const int exponent = e + top + 127;
  return static_cast<uint16_t>(exponent << 7 | ((m << (7 - top)) & 0x7f));
}

template <int kMantissaBits, int kBias, bool kHasInfinity>
constexpr ByteTable float_table() {
  ByteTable table{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> kMantissaBits;
    const int mantissa = code & ((1 << kMantissaBits) - 1);
    const int whole = exponent == 0 ? mantissa : mantissa | 1 << kMantissaBits;
    const int power = (exponent == 0 ? 1 : exponent) - kBias - kMantissaBits;
    uint16_t value = exact_bfloat16(whole, power);
    if (kHasInfinity && code >= 0x7c) value = code == 0x7c ? 0x7f80 : 0x7fc0;
    if (!kHasInfinity && code == 0x7f) value = 0x7fc0;
    table.low[code] = static_cast<uint8_t>(value);
    table.high[code] = static_cast<uint8_t>(value >> 8);
  }
  return table;
}

struct E4M3Bytes {
  static constexpr ByteTable kTable = float_table<3, 7, false>();
};
struct E5M2Bytes {
  static constexpr ByteTable kTable = float_table<2, 15, true>();
};
template <class Code>
struct Bytes {
  static constexpr int kExpand = 2;
  static constexpr int kKeyBytes = 64;     // of a raw register of keys
  static constexpr int kValueDots = 2;
  static constexpr int kGroupBytes = 64;
  static constexpr int kRegsPerLoad = 1;
  static constexpr bool kInOrder = true;

  U low0, low1, high0, high1;

  Bytes()
      : low0(_mm512_load_si512(Code::kTable.low)),
        low1(_mm512_load_si512(Code::kTable.low + 64)),
        high0(_mm512_load_si512(Code::kTable.high)),
        high1(_mm512_load_si512(Code::kTable.high + 64)) {}

  // Bytes (a, b, c, d) of each lane to (a, c) and (b, d).
  __attribute__((always_inline)) void expand(U x, U (&r)[2]) const {
    const U low = _mm512_permutex2var_epi8(low0, x, low1);
    U high = _mm512_permutex2var_epi8(high0, x, high1);
    high = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8(-128), 0xf8);
    // (a & c) | b, and (a & c) | b of the other halves
    const U mask = _mm512_set1_epi16(0x00ff);
    r[0] = _mm512_ternarylogic_epi32(low, _mm512_slli_epi16(high, 8), mask, 0xec);
    r[1] = _mm512_ternarylogic_epi32(high, _mm512_srli_epi16(low, 8), mask, 0xdc);
  }

  VLLM_INLINE U load_keys(const uint8_t* at) { return _mm512_loadu_si512(at); }

  // Four states' bytes side by side: units (0, 2) and (1, 3) of each element.
  template <int kRegs>
  __attribute__((always_inline)) void values(const uint8_t* group, int elem, int count,
                                             U (&r)[2][kRegs]) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i) {
      U pair[2];
      expand(value_units(group, elem, count, i), pair);
      r[0][i] = pair[0];
      r[1][i] = pair[1];
    }
  }

  // Probabilities of states (0, 2) and (1, 3) to a unit each.
  VLLM_INLINE void store_probabilities(uint32_t* to, F p) {
    const __m256i pairs = (__m256i)_mm512_cvtneps_pbh(p);
    const __m256i low = _mm256_shufflelo_epi16(pairs, 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_shufflehi_epi16(low, 0xd8));
  }
};

// Codes of kBits: 16-bit words of four codes from the lowest bit on, looked up in 32
// entries by five bits, of which the codes' own decide.
template <int kBits>
struct Nibbles {
  static constexpr int kExpand = 4;
  static constexpr int kKeyBytes = 16 * kBits;
  static constexpr int kValueDots = 1;
  static constexpr int kGroupBytes = 16 * kBits;  // 64 elements of two states
  static constexpr int kRegsPerLoad = 4;
  static constexpr bool kInOrder = false;

  U table;
  U words;   // which bytes of a register make its words
  U shifts;

  // `of_pairs`: words of two states side by side, who take turns of 8 codes of 3 bits;
  // else words of one state.
  Nibbles(const uint16_t (&values)[1 << kBits], bool of_pairs) {
    alignas(64) uint16_t entries[32];
    for (int i = 0; i < 32; ++i) entries[i] = values[i & ((1 << kBits) - 1)];
    table = _mm512_load_si512(entries);
    alignas(64) uint8_t order[64];
    alignas(64) uint16_t shift[32];
    for (int word = 0; word < 32; ++word) {
      // Without pairs a turn is a lane: words in order.
      const int turn = of_pairs ? word / 4 * 2 + word % 2 : word / 2;
      const int second = of_pairs ? word / 2 % 2 : word % 2;
      const int bit = turn * 8 * kBits + second * 4 * kBits;
      order[2 * word] = static_cast<uint8_t>(bit / 8);
      order[2 * word + 1] = static_cast<uint8_t>(bit / 8 + 1);
      shift[word] = static_cast<uint16_t>(bit % 8);
    }
    words = _mm512_load_si512(order);
    shifts = _mm512_load_si512(shift);
  }

  __attribute__((always_inline)) void expand(U x, U (&r)[4]) const {
    r[0] = _mm512_permutexvar_epi16(x, table);
    r[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, kBits), table);
    r[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 2 * kBits), table);
    r[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 3 * kBits), table);
  }

  // 4-bit words lie as they are wanted.
  __attribute__((always_inline)) U to_words(U bytes) const {
    if constexpr (kBits == 4) return bytes;
    return _mm512_srlv_epi16(_mm512_permutexvar_epi8(words, bytes), shifts);
  }

  __attribute__((always_inline)) U load_keys(const uint8_t* at) const {
    if constexpr (kBits == 4) return _mm512_loadu_si512(at);
    return to_words(masked_bytes(at, kKeyBytes));
  }

  // Two states' words side by side, four elements of each: `count` from `elem` on.
  __attribute__((always_inline)) U value_words(const uint8_t* group, int elem,
                                               int count) const {
    const uint8_t* const at = group + elem / 64 * kGroupBytes;
    if (kBits == 4 && count >= 64) return _mm512_loadu_si512(at);
    const int bytes = count >= 64 ? kGroupBytes : count * kBits / 4;
    return to_words(masked_bytes(at, bytes));
  }
  template <int kRegs>
  __attribute__((always_inline)) void values(const uint8_t* group, int elem, int count,
                                             U (&r)[1][kRegs]) const {
    static_assert(kRegs == 4);
    expand(value_words(group, elem, count), r[0]);
  }

  VLLM_INLINE void store_probabilities(uint32_t* to, F p) {
    BFloat16Units::store_probabilities(to, p);
  }
};

// Whole codes with 0 in the middle: exact, and small beside the values' range.
template <int kBits>
struct Centred {
  static constexpr int kCentre = 1 << (kBits - 1);
  uint16_t values[1 << kBits];
  constexpr Centred() : values{} {
    for (int code = 0; code < 1 << kBits; ++code) {
      const int x = code - kCentre;
      values[code] = static_cast<uint16_t>(
          exact_bfloat16(x < 0 ? -x : x, 0) | (x < 0 ? 0x8000 : 0));
    }
  }
};

// What formats of one head slot share, from how their two sides are coded. Format: the
// tiled table of kv_formats.h, with its codes' turns.
template <class KeyCode, class ValueCode>
struct PairCells : TiledCells<BFloat16Units> {
  struct Tables {
    KeyCode key;
    ValueCode value;
  };
  static constexpr int kKeyBytes = KeyCode::kKeyBytes;
  static constexpr int kKeyExpand = KeyCode::kExpand;
  static constexpr int kValueDots = ValueCode::kValueDots;
  static constexpr int kValueRegs = 4;
  static constexpr int kGroupBytes = ValueCode::kGroupBytes;
  static constexpr int kRegsPerLoad = ValueCode::kRegsPerLoad;
  static constexpr bool kValuesInOrder = ValueCode::kInOrder;
  static constexpr bool kValuesFinite = !ValueCode::kInOrder;  // table entries are
  static constexpr int kFewRows = kValuesInOrder ? 8 : 4;
  static constexpr bool kFinishes = !ValueCode::kInOrder;

  PairCells(const AttentionArgs& a, int64_t state_bytes, int64_t value_region,
            int64_t bytes_of_value, const Tables& codes)
      : TiledCells(a, 1, state_bytes, value_region, bytes_of_value),
        head_size(a.query.size),
        head_size_v(a.out.size),
        coded(codes) {}

  static int64_t finish_floats(const AttentionArgs& a) {
    return kFinishes ? round_up(a.out.size, 64) : 0;
  }

  Tables tables() const { return coded; }

  __attribute__((always_inline)) U load_keys(const Tables& tables,
                                             const uint8_t* at) const {
    return tables.key.load_keys(at);
  }
  VLLM_INLINE void expand_key(const Tables& tables, U raw, U (&units)[kKeyExpand]) {
    tables.key.expand(raw, units);
  }
  template <int kRegs>
  __attribute__((always_inline)) void load_values(const Tables& tables,
                                                  const ValueGroup& group, int elem,
                                                  int count,
                                                  U (&r)[kValueDots][kRegs]) const {
    tables.value.template values<kRegs>(group.codes, elem, count, r);
  }
  VLLM_INLINE void store_probabilities(uint32_t* to, F p) {
    ValueCode::store_probabilities(to, p);
  }

  void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) const {
    alignas(64) float row[kMaxHead];
    load_floats(row, query, from, 2 * units);
    pair_up<kKeyExpand>(to, row, units);
  }

  void finish(const float* acc, float bias, float* to) const {
    put_in_order(to, acc, head_size_v, bias);
  }

  static constexpr int kMaxHead = 1024;

  int head_size;
  int head_size_v;
  Tables coded;
};

}  // namespace vllm_cpu::VLLM_ISA

#endif
