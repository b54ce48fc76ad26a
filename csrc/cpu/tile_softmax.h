// From a tile's scores to its probabilities: scales, caps, masks, and the running
// softmax of each row.
#pragma once

#include "tile_frame.h"

namespace vllm_cpu::VLLM_ISA {

template <class Frame>
class TileSoftmax {
  using Cells = typename Frame::Cells;
  static constexpr int kParts = Frame::kParts;
  static constexpr int kTileVectors = kTileStates / kLanes;

 public:
  // Leaves probabilities, what sums of values are rescaled by, and the new maximum.
  static __attribute__((noinline)) void run(Frame& t, int64_t tile, int vectors) {
    load_numbers(t, tile, vectors);
    if (vectors == kTileVectors) {
      weigh<kTileVectors>(t, tile, vectors);
    } else {
      weigh<0>(t, tile, vectors);
    }
  }

 private:
  static void load_numbers(Frame& t, int64_t tile, int vectors) {
    if constexpr (Cells::kKeyScales || Cells::kValueScales) {
      for (int v = 0; v < vectors; ++v) {
        t.cells.load_numbers(t.states.keys(v), t.states.value_tile(v),
                             t.states.seen(tile, v), v, t.numbers);
      }
    }
  }

  // Of a query in whole numbers.
  static float query_scale(const Frame& t, int row) {
    if constexpr (kParts == 1) return 1.f;
    const uint32_t* const end = t.queries + (row + 1) * t.query_row;
    return reinterpret_cast<const float*>(end - kLanes)[1];
  }

  // kCount: the number of vectors, or 0 where it is not known.
  template <int kCount>
  static __attribute__((always_inline)) void weigh(Frame& t, int64_t tile, int vectors) {
    const int64_t shares = 4 * static_cast<int64_t>(t.rows) * vectors;
    const int lines = static_cast<int>(t.ahead.tile_lines() / shares);
    for (int row = 0; row < t.rows; ++row) {
      t.weight[row] = mask_scores<kCount>(t, tile, row, vectors);
    }
    for (int row = 0; row < t.rows; row += kLanes) {
      const F before = load(t.running.max + row);
      const F now = max(before, load(t.weight + row));
      store(t.rescale + row, exp(sub(before, now)));
      store(t.running.max + row, now);
    }
    for (int row = 0; row < t.rows; ++row) {
      const float sum = exponentiate<kCount>(t, row, vectors, lines);
      t.running.sum[row] = t.running.sum[row] * t.rescale[row] + sum;
      if constexpr (Cells::kValueBiases) add_value_biases(t, row, vectors);
    }
  }

  // Scales, caps and masks a row's scores; returns their maximum.
  template <int kCount>
  static __attribute__((always_inline)) float mask_scores(Frame& t, int64_t tile, int row,
                                                          int vectors) {
    const int count = kCount > 0 ? kCount : vectors;
    const int64_t lo = t.row_begin[row] - tile;
    const int64_t hi = t.row_end[row] - tile;
    const bool partial = lo > 0 || hi < vectors * kLanes;
    const bool capped = t.a.soft_cap > 0.f;
    const float factor = capped ? t.a.scale / t.a.soft_cap : t.a.scale;
    const F scale = set1(factor * query_scale(t, row));
    float* const scores = t.scores + row * kTileStates;
    F largest = set1(kLowestMax);
#pragma GCC unroll 4
    for (int v = 0; v < count; ++v) {
      F x = load(scores + v * kLanes);
      if constexpr (Cells::kKeyBiases) {
        x = fma(load(t.numbers.key_bias + v * kLanes), set1(t.query_sums[row]), x);
      }
      x = mul(x, scale);
      if constexpr (Cells::kKeyScales) {
        x = mul(x, load(t.numbers.key_scale + v * kLanes));
      }
      if (capped) x = mul(tanh(x), set1(t.a.soft_cap));
      if (partial) {
        x = keep_range(x, static_cast<int>(larger(lo - v * kLanes, 0)),
                       static_cast<int>(larger(hi - v * kLanes, 0)));
      }
      store(scores + v * kLanes, x);
      largest = max(largest, x);
    }
    return reduce_max(largest);
  }

  // Leaves e^(score - max) as the row's probabilities, and as its scores where biases
  // follow; returns their sum. Asks for `lines` lines ahead per vector.
  template <int kCount>
  static __attribute__((always_inline)) float exponentiate(Frame& t, int row,
                                                           int vectors, int lines) {
    const int count = kCount > 0 ? kCount : vectors;
    const F top = set1(t.running.max[row]);
    float* const scores = t.scores + row * kTileStates;
    F weighed[kTileVectors];
    if constexpr (kParts > 1) {
      for (int v = count; v < kTileVectors; ++v) weighed[v] = set1(0.f);
    }
    F sum = set1(0.f);
#pragma GCC unroll 4
    for (int v = 0; v < count; ++v) {
      const uint8_t* const ahead = t.ahead.take(lines);
      for (int i = 0; i < lines; ++i) prefetch_line(ahead + i * kCacheLine);
      F p = exp(sub(load(scores + v * kLanes), top));
      sum = add(sum, p);
      if constexpr (Cells::kValueBiases) store(scores + v * kLanes, p);
      if constexpr (Cells::kValueScales) {
        p = mul(p, load(t.numbers.value_scale + v * kLanes));
      }
      if constexpr (kParts == 1) {
        t.cells.store_probabilities(
            t.probabilities + row * Frame::kRowUnits + v * kLanes / Frame::kElems, p);
      } else {
        weighed[v] = p;
      }
    }
    if constexpr (kParts > 1) {
      t.factors[row] = t.cells.store_whole_probabilities(
          t.probabilities + row * kParts * Frame::kRowUnits, weighed);
    }
    return reduce_add(sum);
  }

  static void add_value_biases(Frame& t, int row, int vectors) {
    F sum = set1(0.f);
    for (int v = 0; v < vectors; ++v) {
      sum = fma(load(t.scores + row * kTileStates + v * kLanes),
                load(t.numbers.value_bias + v * kLanes), sum);
    }
    float& bias = t.value_bias(t.running, row);
    bias = bias * t.rescale[row] + reduce_add(sum);
  }
};

}  // namespace vllm_cpu::VLLM_ISA
