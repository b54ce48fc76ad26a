// The softmax over a run of keys, for a tile of rows: the largest score, the sum of
// 2^(score - max), and the same sum weighted by values, and by their biases. Scores are
// log2(e) times what their e^ is taken of. Two runs fold into one.
#pragma once

#include "simd.h"
#include "work.h"

namespace vllm_cpu::VLLM_ISA {

constexpr float kLowestMax = -1e30f;  // of a row that has seen no key yet; finite
constexpr int kRowSlots = (kMaxRows + 15) / 16 * 16;  // whole registers of rows

// Points into memory of floats(rows, acc_row); acc_row is a multiple of kLanes.
struct SoftmaxState {
  float* acc = nullptr;  // [rows, acc_row]
  float* max = nullptr;  // [kRowSlots]
  float* sum = nullptr;  // [kRowSlots]
  float* bias = nullptr; // [kRowSlots]
  int rows = 0;
  int64_t acc_row = 0;

  static int64_t floats(int64_t rows, int64_t acc_row) {
    return rows * acc_row + 3 * kRowSlots;
  }

  SoftmaxState() = default;
  SoftmaxState(float* base, int num_rows, int64_t row_floats)
      : acc(base),
        max(base + num_rows * row_floats),
        sum(max + kRowSlots),
        bias(sum + kRowSlots),
        rows(num_rows),
        acc_row(row_floats) {}

  void reset() const {
    for (int i = 0; i < kRowSlots; ++i) {
      max[i] = kLowestMax;
      sum[i] = bias[i] = 0.f;
    }
    const F zero = set1(0.f);
    for (int64_t i = 0; i < rows * acc_row; i += kLanes) store(acc + i, zero);
  }

  // Adds the keys of `from`. keep, take: room for kRowSlots floats each.
  void fold(const SoftmaxState& from, float* keep, float* take) const {
    for (int row = 0; row < rows; row += kLanes) {
      const F a = load(max + row);
      const F b = load(from.max + row);
      const F top = vllm_cpu::VLLM_ISA::max(a, b);
      const F kept = exp2(sub(a, top));
      const F taken = exp2(sub(b, top));
      store(keep + row, kept);
      store(take + row, taken);
      store(max + row, top);
      store(sum + row, fma(load(sum + row), kept, mul(load(from.sum + row), taken)));
      store(bias + row, fma(load(bias + row), kept, mul(load(from.bias + row), taken)));
    }
    for (int row = 0; row < rows; ++row) {
      const F kept = set1(keep[row]);
      const F taken = set1(take[row]);
      float* const a = acc + row * acc_row;
      const float* const b = from.acc + row * acc_row;
      for (int64_t i = 0; i < acc_row; i += kLanes) {
        store(a + i, fma(load(a + i), kept, mul(load(b + i), taken)));
      }
    }
  }

  // One more score per row, which takes probability and adds no value.
  void add_scores(const float* scores, float* keep) const {
    for (int row = 0; row < rows; row += kLanes) {
      const F a = load(max + row);
      const F b = load(scores + row);
      const F top = vllm_cpu::VLLM_ISA::max(a, b);
      const F kept = exp2(sub(a, top));
      store(keep + row, kept);
      store(max + row, top);
      store(sum + row, fma(load(sum + row), kept, exp2(sub(b, top))));
      store(bias + row, mul(load(bias + row), kept));
    }
    for (int row = 0; row < rows; ++row) {
      const F kept = set1(keep[row]);
      float* const a = acc + row * acc_row;
      for (int64_t i = 0; i < acc_row; i += kLanes) store(a + i, mul(load(a + i), kept));
    }
  }
};

}  // namespace vllm_cpu::VLLM_ISA
