// The lanes of a multiply-accumulate: how many elements a 32-bit unit holds, and how
// queries, probabilities and value rows are brought into units.
#pragma once

#include "api.h"
#include "simd.h"

namespace vllm_cpu::VLLM_ISA {

// One float per unit: exact for every type.
struct Float32Units {
  using Keys = Float32Units;
  using Values = Float32Units;
  using Sum = F;
  using Whole = F;
  using Factor = U;
  static constexpr int kElems = 1;
  static constexpr int kParts = 1;
  static constexpr int kRows = kBlockRows;        // of a product block
  static constexpr int kVectors = kBlockVectors;

  VLLM_INLINE Factor factor(const uint32_t* a, int64_t) { return u_set1(*a); }

  VLLM_INLINE F dot(F acc, U b, U a) { return fma(as_float(a), as_float(b), acc); }
  VLLM_INLINE void add_one(F& acc, U b, const uint32_t* a, int64_t) {
    acc = dot(acc, b, u_set1(*a));
  }
  VLLM_INLINE void add(F& acc, U b, U a) { acc = dot(acc, b, a); }
  VLLM_INLINE void interleave(U (&)[1]) {}
  VLLM_INLINE U ones() { return as_units(set1(1.f)); }
  VLLM_INLINE void store_probabilities(uint32_t* to, F p) { u_store(to, as_units(p)); }

  // The head that starts at element `from`, as units, 0 past its size.
  static void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) {
    const uint8_t* const data = static_cast<const uint8_t*>(query.data) +
                                from * dtype_bytes(query.dtype);
    for (int i = 0; i < units; i += kLanes) {
      const int left = query.size - i;
      F x;
      switch (query.dtype) {
        case kFloat32: x = load_as_float<kFloat32>(data + i * 4, left); break;
        case kFloat16: x = load_as_float<kFloat16>(data + i * 2, left); break;
        default: x = load_as_float<kBFloat16>(data + i * 2, left); break;
      }
      u_store(to + i, as_units(x));
    }
  }
};

#if defined(__AVX512BF16__)
// Two bf16 per unit, for bf16 queries: products are exact, sums are fp32, and the
// probabilities are rounded to bf16.
struct BFloat16Units {
  using Keys = BFloat16Units;
  using Values = BFloat16Units;
  using Sum = F;
  using Whole = F;
  using Factor = U;
  static constexpr int kElems = 2;
  static constexpr int kParts = 1;
  static constexpr int kRows = kBlockRows;        // of a product block
  static constexpr int kVectors = kBlockVectors;

  VLLM_INLINE Factor factor(const uint32_t* a, int64_t) { return u_set1(*a); }

  VLLM_INLINE F dot(F acc, U b, U a) {
    return _mm512_dpbf16_ps(acc, (__m512bh)b, (__m512bh)a);
  }

  // With one unit in memory as every lane of a: GCC 12 does not fold the broadcast.
  // Volatile keeps the prefetches between the products where they are written.
  VLLM_INLINE void add_one(F& acc, U b, const uint32_t* a, int64_t) {
    asm volatile("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(b), "m"(*a));
  }
  VLLM_INLINE void add(F& acc, U b, U a) { acc = dot(acc, b, a); }

  // Two rows of 32 elements to 32 (row 0, row 1) pairs.
  VLLM_INLINE void interleave(U (&rows)[2]) {
    static const uint16_t kOrder[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const U low = _mm512_loadu_si512(kOrder);
    const U high = _mm512_loadu_si512(kOrder + 32);
    const U first = _mm512_permutex2var_epi16(rows[0], low, rows[1]);
    rows[1] = _mm512_permutex2var_epi16(rows[0], high, rows[1]);
    rows[0] = first;
  }

  VLLM_INLINE U ones() { return u_set1(0x3f803f80u); }

  VLLM_INLINE void store_probabilities(uint32_t* to, F p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(p));
  }

  static void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) {
    const uint16_t* const data = static_cast<const uint16_t*>(query.data) + from;
    for (int i = 0; i < units; i += kLanes) {
      u_store(to + i, load_pairs(data + i * 2, query.size - i * 2));
    }
  }
};

// Four int8 per unit, for int8 cells. Queries and probabilities are whole numbers times
// a scale per row, in two parts of eight bits: finer than bf16, and sums are exact.
struct Int8Units {
  struct Sum {
    U high;
    U low;
  };
  using Whole = U;  // the parts one after the other
  struct Factor {
    U high;
    U low;
  };
  static constexpr int kElems = 4;
  static constexpr int kParts = 2;
  static constexpr int kRows = kBlockRows;        // of a product block
  static constexpr int kVectors = kBlockVectors;

  VLLM_INLINE Factor factor(const uint32_t* a, int64_t part) {
    return {u_set1(a[0]), u_set1(a[part])};
  }

  VLLM_INLINE F number(U whole) { return _mm512_cvtepi32_ps(whole); }

  // Keys with 128 added, times queries from -2^14 to 2^14 in steps of 128 and of 1.
  struct Keys;
  // Values times probabilities below 2^16, in steps of 256 and of 1.
  struct Values;

  // Sums in place, where GCC 12 copies what the intrinsic adds to.
  VLLM_INLINE U dot_bytes(U acc, U without_sign, U with_sign) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(without_sign), "v"(with_sign));
    return acc;
  }
  VLLM_INLINE U dot_signed(U acc, U b, const uint32_t* a) {
    asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(b), "m"(*a));
    return acc;
  }
  VLLM_INLINE void add_one(Sum& acc, U b, const uint32_t* a, int64_t part) {
    acc.high = dot_signed(acc.high, b, a);
    acc.low = dot_signed(acc.low, b, a + part);
  }
};

struct Int8Units::Keys : Int8Units {
  static constexpr float kMost = 127.f * 128.f;

  VLLM_INLINE U next_part(U high, U low) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
  }
  VLLM_INLINE U dot(U acc, U b, U a) { return dot_bytes(acc, b, a); }
  VLLM_INLINE void add(Sum& acc, U b, const Factor& a) {
    acc.high = dot(acc.high, b, a.high);
    acc.low = dot(acc.low, b, a.low);
  }
};

struct Int8Units::Values : Int8Units {
  static constexpr float kMost = 255.f * 256.f;

  VLLM_INLINE U next_part(U high, U low) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  }
  VLLM_INLINE U dot(U acc, U b, U a) { return dot_bytes(acc, a, b); }
  VLLM_INLINE void add(Sum& acc, U b, const Factor& a) {
    acc.high = dot(acc.high, b, a.high);
    acc.low = dot(acc.low, b, a.low);
  }
};
#endif

}  // namespace vllm_cpu::VLLM_ISA
