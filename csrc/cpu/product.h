// Small matrix products in registers: C = A B or C = C * rescale + A B, for A [rows,
// steps] and B [steps, vectors].
//
// A holds units row by row, B one register of units per (step, vector). Each element of
// C is summed over the steps in order, whatever the blocking: rows never influence one
// another's rounding.
#pragma once

#include "units.h"

namespace vllm_cpu::VLLM_ISA {

struct ProductArgs {
  float* c;
  int64_t c_row;         // floats from row to row
  const uint32_t* a;
  int64_t a_row;         // units from row to row
  const uint32_t* b;
  int64_t b_step;        // units from step to step
  int64_t b_vector;      // units from vector to vector
  int steps;
  const float* rescale;  // null: overwrite C; else C = C * rescale[row] + A B
  const float* scales;   // null, or per element of a vector: C = C + scales * (A B)
  int64_t scales_vector; // floats from vector to vector
  int64_t a_part;        // units from part to part, where units have two
  int64_t starts;        // 0, or units from a row of A to what its sums start from
  const float* factors;  // per row, of products with two parts
};

// What a sum starts from and how it is written, for numbers and for whole numbers.
template <class Units>
VLLM_INLINE typename Units::Sum start_of(const ProductArgs& p, const float* c, int row) {
  if constexpr (Units::kParts > 1) {
    if (p.starts == 0) return Units::zero();
    const uint32_t* const starts = p.a + row * p.a_row + p.starts;
    return {u_set1(starts[0]), u_set1(starts[1])};
  } else {
    return p.rescale == nullptr ? set1(0.f) : mul(load(c), set1(p.rescale[row]));
  }
}

template <class Units>
VLLM_INLINE F end_of(const ProductArgs& p, const typename Units::Sum& sum, const float* c,
                     int row) {
  if constexpr (Units::kParts > 1) {
    const F whole = total(sum, Units::kStep);
    if (p.rescale == nullptr) return whole;
    return fma(whole, set1(p.factors[row]), mul(load(c), set1(p.rescale[row])));
  } else {
    return sum;
  }
}

template <class Units, int kRows, int kVectors>
static void product_block(const ProductArgs& p) {
  typename Units::Sum acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = start_of<Units>(p, p.c + r * p.c_row + v * kLanes, r);
    }
  }
  const uint32_t* a = p.a;
  const uint32_t* b = p.b;
  for (int step = 0; step < p.steps; ++step, ++a, b += p.b_step) {
    U column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = u_load(b + v * p.b_vector);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const typename Units::Factor unit = Units::factor(a + r * p.a_row, p.a_part);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Units::add(acc[r][v], column[v], unit);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* const c = p.c + r * p.c_row + v * kLanes;
      F sum = end_of<Units>(p, acc[r][v], c, r);
      if (p.scales != nullptr) {
        sum = fma(sum, load(p.scales + v * p.scales_vector), load(c));
      }
      store(c, sum);
    }
  }
}

template <class Units, int kVectors, int kRows = Units::kRows>
static void product_rows(const ProductArgs& p, int rows) {
  if constexpr (kRows == 0) {
    return;
  } else if (rows == kRows) {
    product_block<Units, kRows, kVectors>(p);
  } else {
    product_rows<Units, kVectors, kRows - 1>(p, rows);
  }
}

template <class Units, int kVectors = Units::kVectors>
static void product_vectors(const ProductArgs& p, int rows, int vectors) {
  if constexpr (kVectors == 0) {
    return;
  } else if (vectors == kVectors) {
    product_rows<Units, kVectors>(p, rows);
  } else {
    product_vectors<Units, kVectors - 1>(p, rows, vectors);
  }
}

template <class Units>
void product(const ProductArgs& whole, int rows, int vectors) {
  const int row_blocks = (rows + Units::kRows - 1) / Units::kRows;
  for (int v = 0; v < vectors; v += Units::kVectors) {
    for (int block = 0; block < row_blocks; ++block) {
      const int begin = rows * block / row_blocks;  // blocks of nearly equal height
      const int end = rows * (block + 1) / row_blocks;
      ProductArgs p = whole;
      p.a += begin * p.a_row;
      p.b += v * p.b_vector;
      p.c += begin * p.c_row + v * kLanes;
      if (p.scales != nullptr) p.scales += v * p.scales_vector;
      if (p.rescale != nullptr) p.rescale += begin;
      if (p.factors != nullptr) p.factors += begin;
      const int width = static_cast<int>(smaller(vectors - v, Units::kVectors));
      product_vectors<Units>(p, end - begin, width);
    }
  }
}

// Compiled once, in product.cpp.
#if !defined(VLLM_PRODUCT_UNIT)
extern template void product<Float32Units>(const ProductArgs&, int, int);
#if defined(__AVX512BF16__)
extern template void product<BFloat16Units>(const ProductArgs&, int, int);
extern template void product<Int8Units::Keys>(const ProductArgs&, int, int);
extern template void product<Int8Units::Values>(const ProductArgs&, int, int);
#endif
#endif

}  // namespace vllm_cpu::VLLM_ISA
