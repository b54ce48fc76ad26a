// Products with packed weights, a panel at a time, written once for every type.
//
// A weight is cut into panels of kPanel outputs. A panel is stored step by step: of each
// output one 32-bit unit: a float, or two bf16 or float16 that follow each other in the
// row. What is missing to whole units and panels is 0. A sum is fp32 and runs over the
// steps in order, whatever else is computed: a row's bits depend on nothing else in the
// batch.
#pragma once

#include "linear.h"
#include "simd.h"

namespace vllm_cpu::VLLM_ISA {

constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kUnitsAhead = 1024;      // 4 KiB: 2 and 8 KiB measured slower

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

// How units of weights are multiplied, and what a row of activations holds for a step.
struct FloatSteps {
  static constexpr int kDType = kFloat32;
  static constexpr int kElems = 1;     // weights per unit
  static constexpr int kWords = 1;     // 32-bit words of a row per step
  static constexpr int kRowDType = kFloat32;
  static constexpr int kMaxRows = kLanes == 16 ? 8 : kLanes == 8 ? 3 : 1;
  struct Column {
    F x;
  };
  VLLM_INLINE Column column(const uint32_t* p) { return {as_float(u_load(p))}; }
  VLLM_INLINE F dot(F acc, const Column& c, const uint32_t* a) {
    return fma(c.x, as_float(u_set1(*a)), acc);
  }
  // Element `which` of each unit, as float.
  VLLM_INLINE F element(U units, int) { return as_float(units); }
};

#if defined(__AVX512BF16__)
struct BFloat16Steps {
  static constexpr int kDType = kBFloat16;
  static constexpr int kElems = 2;
  static constexpr int kWords = 1;
  static constexpr int kRowDType = kBFloat16;
  static constexpr int kMaxRows = 8;
  struct Column {
    U x;
  };
  VLLM_INLINE Column column(const uint32_t* p) { return {u_load(p)}; }
  VLLM_INLINE F dot(F acc, const Column& c, const uint32_t* a) {
    return _mm512_dpbf16_ps(acc, (__m512bh)c.x, (__m512bh)u_set1(*a));
  }
  VLLM_INLINE F element(U units, int which) {
    const Words bits = (Words)units;
    return (F)(which == 0 ? bits << 16 : bits & 0xffff0000u);
  }
};
#else
// Rows stay fp32: weights are widened in registers.
struct BFloat16Steps {
  static constexpr int kDType = kBFloat16;
  static constexpr int kElems = 2;
  static constexpr int kWords = 2;
  static constexpr int kRowDType = kFloat32;
  static constexpr int kMaxRows = kLanes == 8 ? 2 : 1;
  struct Column {
    F low, high;
  };
  VLLM_INLINE Column column(const uint32_t* p) {
    const Words bits = (Words)u_load(p);
    return {(F)(bits << 16), (F)(bits & 0xffff0000u)};
  }
  VLLM_INLINE F dot(F acc, const Column& c, const uint32_t* a) {
    acc = fma(c.low, as_float(u_set1(a[0])), acc);
    return fma(c.high, as_float(u_set1(a[1])), acc);
  }
};
#endif

// Rows stay fp32 on every instruction set: products are exact. Where there are no
// instructions to widen with, doing it for every row costs more than sums that do not fit
// into registers.
struct Float16Steps {
  static constexpr int kDType = kFloat16;
  static constexpr int kElems = 2;
  static constexpr int kWords = 2;
  static constexpr int kRowDType = kFloat32;
  static constexpr int kMaxRows = kLanes == 16 ? 8 : kLanes == 8 ? 3 : 4;
  struct Column {
    F low, high;
  };
  VLLM_INLINE Column column(const uint32_t* p) {
    Column halves;
    split_f16(u_load(p), halves.low, halves.high);
    return halves;
  }
  VLLM_INLINE F dot(F acc, const Column& c, const uint32_t* a) {
    acc = fma(c.low, as_float(u_set1(a[0])), acc);
    return fma(c.high, as_float(u_set1(a[1])), acc);
  }
  VLLM_INLINE F element(U units, int which) {
    F low, high;
    split_f16(units, low, high);
    return which == 0 ? low : high;
  }
};

template <class Steps>
VLLM_INLINE int64_t steps_of(int64_t inputs) {
  return (inputs + Steps::kElems - 1) / Steps::kElems;
}

// A row's 32-bit words; rows lie whole lines apart.
template <class Steps>
VLLM_INLINE int64_t words_of_row(int64_t inputs) {
  return round_up(steps_of<Steps>(inputs) * Steps::kWords, 16);
}

// One row of x as words, 0 past its end.
template <class Steps>
void copy_row(const LinearArgs& a, int64_t row, uint32_t* to) {
  constexpr int kBytes = dtype_bytes(Steps::kDType);
  constexpr int kRowBytes = dtype_bytes(Steps::kRowDType);
  const uint8_t* const from = static_cast<const uint8_t*>(a.x) + row * a.x_stride * kBytes;
  uint8_t* const words = reinterpret_cast<uint8_t*>(to);
  const int64_t elements = words_of_row<Steps>(a.inputs) * 4 / kRowBytes;
  for (int64_t i = 0; i < elements; i += kLanes) {
    const auto left = static_cast<int>(larger(0, smaller(kLanes, a.inputs - i)));
    const F x = left == 0 ? set1(0.f) : load_as_float<Steps::kDType>(from + i * kBytes, left);
    store_from_float<Steps::kRowDType>(words + i * kRowBytes, x);
  }
}

// c [kRows, kPanel] = bias + rows a times one panel b. `kFetch`: the panel comes from
// memory and is asked for ahead.
template <class Steps, int kRows, bool kFetch>
void panel_block(float* c, const float* bias, const uint32_t* a, int64_t a_row,
                 const uint32_t* b, int64_t steps) {
  F acc[kRows][kPanelVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      acc[r][v] = bias == nullptr ? set1(0.f) : load(bias + v * kLanes);
    }
  }
  for (int64_t step = 0; step < steps; ++step, a += Steps::kWords, b += kPanel) {
    if constexpr (kFetch) {
      prefetch_line(b + kUnitsAhead);
      prefetch_line(b + kUnitsAhead + 16);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      const typename Steps::Column column = Steps::column(b + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        acc[r][v] = Steps::dot(acc[r][v], column, a + r * a_row);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      store(c + r * kPanel + v * kLanes, acc[r][v]);
    }
  }
}

template <class Steps, bool kFetch, int kRows = Steps::kMaxRows>
void panel_rows(int rows, float* c, const float* bias, const uint32_t* a, int64_t a_row,
                const uint32_t* b, int64_t steps) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      return panel_block<Steps, kRows, kFetch>(c, bias, a, a_row, b, steps);
    }
    panel_rows<Steps, kFetch, kRows - 1>(rows, c, bias, a, a_row, b, steps);
  }
}

}  // namespace vllm_cpu::VLLM_ISA
