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
  int groups;            // of `steps` steps, each with a scale per element of a vector
  const float* scales;   // of vectors; those of a vector's groups one after another
  int64_t scales_vector; // floats from vector to vector
  int64_t a_part;        // units from part to part, where units have two
  int64_t starts;        // 0, or units from a row of A to what its sums start from
  const float* factors;  // per row, of products with two parts
};

// The whole number that a row's second part starts from.
VLLM_INLINE U whole_start(const ProductArgs& p, int row) {
  return u_set1(p.starts == 0 ? 0 : p.a[row * p.a_row + p.starts]);
}

template <class Units>
VLLM_INLINE typename Units::Whole start_of_block(const ProductArgs& p, const float* c,
                                                 int row) {
  if constexpr (Units::kParts > 1) {
    return u_set1(0);
  } else {
    return p.rescale == nullptr ? set1(0.f) : mul(load(c), set1(p.rescale[row]));
  }
}

// What is left to do to a sum before it is written.
template <class Units>
VLLM_INLINE F end_of_block(const ProductArgs& p, const typename Units::Whole& sum,
                           const float* c, int row) {
  if constexpr (Units::kParts > 1) {
    const F whole = Units::number(sum);
    if (p.rescale == nullptr) return whole;
    return fma(whole, set1(p.factors[row]), mul(load(c), set1(p.rescale[row])));
  } else {
    return sum;
  }
}

// The same where both parts are summed side by side.
template <class Units>
VLLM_INLINE typename Units::Sum start_of(const ProductArgs& p, const float* c, int row) {
  if constexpr (Units::kParts > 1) {
    return {u_set1(0), whole_start(p, row)};
  } else {
    return start_of_block<Units>(p, c, row);
  }
}

template <class Units>
VLLM_INLINE F end_of(const ProductArgs& p, const typename Units::Sum& sum, const float* c,
                     int row) {
  if constexpr (Units::kParts > 1) {
    return end_of_block<Units>(p, Units::next_part(sum.high, sum.low), c, row);
  } else {
    return end_of_block<Units>(p, sum, c, row);
  }
}

template <class Units, int kRows, int kVectors>
VLLM_INLINE void add_steps(typename Units::Whole (&acc)[kRows][kVectors],
                           const ProductArgs& p, const uint32_t* a, const uint32_t* b) {
  for (int step = 0; step < p.steps; ++step, ++a, b += p.b_step) {
    U column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = u_load(b + v * p.b_vector);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const U unit = u_set1(a[r * p.a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Units::dot(acc[r][v], column[v], unit);
    }
  }
}

template <class Units, int kRows, int kVectors>
static void product_block(const ProductArgs& p) {
  typename Units::Whole acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = start_of_block<Units>(p, p.c + r * p.c_row + v * kLanes, r);
    }
  }
  add_steps<Units>(acc, p, p.a, p.b);
  if constexpr (Units::kParts > 1) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const U start = whole_start(p, r);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = Units::next_part(acc[r][v], start);
      }
    }
    add_steps<Units>(acc, p, p.a + p.a_part, p.b);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* const c = p.c + r * p.c_row + v * kLanes;
      store(c, end_of_block<Units>(p, acc[r][v], c, r));
    }
  }
}

// C = the sum over groups of steps of scales * (A B).
template <class Units, int kRows, int kVectors>
static void grouped_block(const ProductArgs& p) {
  F total[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[r][v] = set1(0.f);
  }
  for (int group = 0; group < p.groups; ++group) {
    F acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = set1(0.f);
    }
    const int64_t step = static_cast<int64_t>(group) * p.steps;
    add_steps<Units>(acc, p, p.a + step, p.b + step * p.b_step);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const F scale = load(p.scales + v * p.scales_vector + group * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) total[r][v] = fma(acc[r][v], scale, total[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(p.c + r * p.c_row + v * kLanes, total[r][v]);
  }
}

// How products are cut into blocks.
template <class Units>
struct PlainBlocks {
  static constexpr int kRows = Units::kRows;
  static constexpr int kVectors = Units::kVectors;
  template <int kHeight, int kWidth>
  static void run(const ProductArgs& p) {
    product_block<Units, kHeight, kWidth>(p);
  }
};
template <class Units>
struct GroupedBlocks {
  static constexpr int kRows = Units::kRows;
  static constexpr int kVectors = (Units::kVectors + 1) / 2;
  template <int kHeight, int kWidth>
  static void run(const ProductArgs& p) {
    grouped_block<Units, kHeight, kWidth>(p);
  }
};

template <class Blocks, int kVectors, int kRows = Blocks::kRows>
static void product_rows(const ProductArgs& p, int rows) {
  if constexpr (kRows == 0) {
    return;
  } else if (rows == kRows) {
    Blocks::template run<kRows, kVectors>(p);
  } else {
    product_rows<Blocks, kVectors, kRows - 1>(p, rows);
  }
}

template <class Blocks, int kVectors = Blocks::kVectors>
static void product_vectors(const ProductArgs& p, int rows, int vectors) {
  if constexpr (kVectors == 0) {
    return;
  } else if (vectors == kVectors) {
    product_rows<Blocks, kVectors>(p, rows);
  } else {
    product_vectors<Blocks, kVectors - 1>(p, rows, vectors);
  }
}

template <class Blocks>
void product_in(const ProductArgs& whole, int rows, int vectors) {
  const int row_blocks = (rows + Blocks::kRows - 1) / Blocks::kRows;
  ProductArgs p = whole;
  for (int v = 0; v < vectors; v += Blocks::kVectors) {
    const int width = static_cast<int>(smaller(vectors - v, Blocks::kVectors));
    p.b = whole.b + v * whole.b_vector;
    if (whole.scales != nullptr) p.scales = whole.scales + v * whole.scales_vector;
    for (int block = 0, begin = 0; block < row_blocks; ++block) {
      const int height = rows / row_blocks + (block < rows % row_blocks ? 1 : 0);
      p.a = whole.a + begin * whole.a_row;
      p.c = whole.c + begin * whole.c_row + v * kLanes;
      if (whole.rescale != nullptr) p.rescale = whole.rescale + begin;
      if (whole.factors != nullptr) p.factors = whole.factors + begin;
      product_vectors<Blocks>(p, height, width);
      begin += height;
    }
  }
}

template <class Units>
void product(const ProductArgs& whole, int rows, int vectors) {
  product_in<PlainBlocks<Units>>(whole, rows, vectors);
}

template <class Units>
void grouped_product(const ProductArgs& whole, int rows, int vectors) {
  product_in<GroupedBlocks<Units>>(whole, rows, vectors);
}

// Compiled once, in product.cpp.
#if !defined(VLLM_PRODUCT_UNIT)
extern template void product<Float32Units>(const ProductArgs&, int, int);
#if defined(__AVX512BF16__)
extern template void product<BFloat16Units>(const ProductArgs&, int, int);
extern template void product<Int8Units::Keys>(const ProductArgs&, int, int);
extern template void product<Int8Units::Values>(const ProductArgs&, int, int);
extern template void grouped_product<BFloat16Units>(const ProductArgs&, int, int);
#endif
#endif

}  // namespace vllm_cpu::VLLM_ISA
