// Codes of 8, 4 and 3 bits as bf16 pairs, by permutes as look-up tables. AVX-512 with
// VBMI and BF16 only.
//
// Every way starts from raw registers whose 32-bit lanes hold whole codes: of one state
// (keys, after a transposition) or of neighbouring states (values, after interleaving).
// A lane's codes come out of the lower and the upper half of it together, so a pair
// holds codes that lie half a lane apart.
#pragma once

#if defined(__AVX512BF16__)

#include "cells.h"

namespace vllm_cpu::VLLM_ISA {

VLLM_INLINE U masked_bytes(const uint8_t* p, int count) {
  const __mmask64 keep = count >= 64 ? ~0ull : (1ull << count) - 1;
  return _mm512_maskz_loadu_epi8(keep, p);
}
VLLM_INLINE __m256i masked_half(const uint8_t* p, int count) {
  const __mmask32 keep = count >= 32 ? ~0u : (1u << count) - 1;
  return _mm256_maskz_loadu_epi8(keep, p);
}
VLLM_INLINE U both_halves(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
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

// Floats in order to the pairs of raw units that expand to kExpand registers.
template <int kExpand>
static void pair_up(uint32_t* to, const float* from, int64_t units) {
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t first = unit / kExpand * (2 * kExpand) + unit % kExpand;
    to[unit] = bfloat16_of(from[first]) |
               static_cast<uint32_t>(bfloat16_of(from[first + kExpand])) << 16;
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
  static constexpr int kValueRegs = 4;
  static constexpr int kValueGroupBytes = 4 * 64;

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

  VLLM_INLINE U load_key(const uint8_t* codes, int elem, int count) {
    return masked_bytes(codes + elem, count);
  }

  // Four states' bytes side by side: units (0, 2) and (1, 3) of each element.
  __attribute__((always_inline)) void values(const uint8_t* const* cells, int64_t offset,
                                             int elem, int count, U (&r)[2][4]) const {
    U x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = masked_bytes(cells[i] + offset + elem, count);
    const U a = _mm512_unpacklo_epi8(x[0], x[1]);
    const U b = _mm512_unpackhi_epi8(x[0], x[1]);
    const U c = _mm512_unpacklo_epi8(x[2], x[3]);
    const U d = _mm512_unpackhi_epi8(x[2], x[3]);
    const U quads[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c),
                        _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      U pair[2];
      expand(quads[i], pair);
      r[0][i] = pair[0];
      r[1][i] = pair[1];
    }
  }

  // Where an element of a block of 64 lies in its sums.
  VLLM_INLINE int place(int elem) {
    return elem % 16 / 4 * 16 + elem / 16 * 4 + elem % 4;
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
  static constexpr int kValueRegs = 4;
  static constexpr int kHalfBytes = 8 * kBits;  // of 64 elements
  static constexpr int kValueGroupBytes = 2 * kHalfBytes;

  U table;
  U words;   // which bytes of a register make its words
  U shifts;

  // `order`: the bytes of two states' words side by side, else of one state's in order.
  Nibbles(const uint16_t (&values)[1 << kBits], bool interleaved) {
    alignas(64) uint16_t entries[32];
    for (int i = 0; i < 32; ++i) entries[i] = values[i & ((1 << kBits) - 1)];
    table = _mm512_load_si512(entries);
    alignas(64) uint8_t order[64];
    alignas(64) uint16_t shift[32];
    for (int word = 0; word < 32; ++word) {
      const int first = interleaved ? word / 2 * 4 * kBits : word * 4 * kBits;  // bit
      const int byte = first / 8 + (interleaved ? word % 2 * 32 : 0);
      order[2 * word] = static_cast<uint8_t>(byte);
      order[2 * word + 1] = static_cast<uint8_t>(byte + 1);
      shift[word] = static_cast<uint16_t>(first % 8);
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

  static constexpr int bytes_of(int elems) { return (elems * kBits + 7) / 8; }

  __attribute__((always_inline)) U to_words(U bytes) const {
    const U x = _mm512_permutexvar_epi8(words, bytes);
    return kBits == 3 ? _mm512_srlv_epi16(x, shifts) : x;
  }

  __attribute__((always_inline)) U load_key(const uint8_t* codes, int elem,
                                            int count) const {
    const U bytes = masked_bytes(codes + elem * kBits / 8, bytes_of(count));
    return kBits == 3 ? to_words(bytes) : bytes;
  }

  // Two states' words side by side, four elements of each.
  __attribute__((always_inline)) U value_words(const uint8_t* first,
                                               const uint8_t* second, int elem,
                                               int count) const {
    const int offset = elem * kBits / 8;
    const int bytes = count >= 64 ? kHalfBytes : bytes_of(count);
    return to_words(both_halves(masked_half(first + offset, bytes),
                                masked_half(second + offset, bytes)));
  }
  __attribute__((always_inline)) void values(const uint8_t* const* cells, int64_t offset,
                                             int elem, int count, U (&r)[1][4]) const {
    expand(value_words(cells[0] + offset, cells[1] + offset, elem, count), r[0]);
  }

  VLLM_INLINE int place(int elem) { return elem % 4 * 16 + elem / 4; }

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

// What formats of contiguous cells share, from how their two sides are coded.
template <class KeyCode, class ValueCode>
struct PairCells : PlainCells<BFloat16Units> {
  struct Tables {
    KeyCode key;
    ValueCode value;
  };
  static constexpr int kKeyExpand = KeyCode::kExpand;
  static constexpr int kRegisterBytes = KeyCode::kKeyBytes;
  static constexpr int kValueDots = ValueCode::kValueDots;
  static constexpr int kValueRegs = ValueCode::kValueRegs;
  static constexpr int kValueGroupBytes = ValueCode::kValueGroupBytes;
  static constexpr int kFewRows = 4;
  static constexpr bool kFinishes = true;

  PairCells(const AttentionArgs& a, int64_t bytes, int64_t offset, const Tables& codes)
      : PlainCells(a, bytes),
        value_offset(offset),
        head_size(a.query.size),
        head_size_v(a.out.size),
        coded(codes) {}

  static int64_t finish_floats(const AttentionArgs& a) {
    return round_up(a.out.size, 64) + round_up(a.query.size, 128);
  }

  Tables tables() const { return coded; }

  __attribute__((always_inline)) U load_key(const uint8_t* cell, int elem,
                                            int count) const {
    return coded.key.load_key(cell, elem, count);
  }
  VLLM_INLINE void expand_key(const Tables& tables, U raw, U (&units)[kKeyExpand]) {
    tables.key.expand(raw, units);
  }
  __attribute__((always_inline)) void load_values(
      const Tables& tables, const uint8_t* const* cells, int elem, int count,
      U (&r)[kValueDots][kValueRegs]) const {
    tables.value.values(cells, value_offset, elem, count, r);
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
    for (int block = 0; block < head_size_v; block += 64) {
      for (int i = 0; i < 64; ++i) to[block + i] = acc[block + ValueCode::place(i)] + bias;
    }
  }

  static constexpr int kMaxHead = 1024;

  int64_t value_offset;
  int head_size;
  int head_size_v;
  Tables coded;
};

}  // namespace vllm_cpu::VLLM_ISA

#endif
