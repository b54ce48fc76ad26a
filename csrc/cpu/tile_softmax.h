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
        if constexpr (Cells::kKeyScales) {
          float* const scale = t.numbers.key_scale + v * kLanes;
          store(scale, mul(load(scale), set1(score_unit(t.a))));
        }
      }
    }
  }

  // What a product of query and key is times; a cap comes next.
  static float score_unit(const AttentionArgs& a) {
    return a.soft_cap > 0.f ? a.scale / a.soft_cap : a.scale * kLog2E;
  }

  // Of a query in whole numbers.
  static float query_scale(const Frame& t, int row) {
    const uint32_t* const end = t.queries + (row + 1) * t.query_row;
    return reinterpret_cast<const float*>(end - kLanes)[1];
  }

  // kCount: the number of vectors, or 0 where it is not known.
  template <int kCount>
  static __attribute__((always_inline)) void weigh(Frame& t, int64_t tile, int vectors) {
    const int64_t shares = 4 * static_cast<int64_t>(t.rows) * vectors;
    const int lines = static_cast<int>(t.ahead.tile_lines() / shares);
    for (int row = 0; row < t.rows; row += kLanes) {
      weigh_rows<kCount>(t, tile, row, vectors, lines);
    }
  }

  // As many rows as a register has lanes, while their scores are near.
  template <int kCount>
  static __attribute__((always_inline)) void weigh_rows(Frame& t, int64_t tile, int row,
                                                        int vectors, int lines) {
    const int rows = static_cast<int>(smaller(kLanes, t.rows - row));
    F each[kLanes];
    F biases[kLanes];
    if (rows < kLanes) {  // asked, as a fill of none is a call all the same
      for (int i = rows; i < kLanes; ++i) each[i] = biases[i] = set1(0.f);
    }
    for (int i = 0; i < rows; ++i) {
      each[i] = mask_scores<kCount>(t, tile, row + i, vectors);
    }
    const F before = load(t.running.max + row);
    const F now = max(before, maxima(each, rows));
    const F rescale = exp2(sub(before, now));
    store(t.rescale + row, rescale);
    store(t.running.max + row, now);
    for (int i = 0; i < rows; ++i) {
      each[i] = exponentiate<kCount>(t, row + i, vectors, lines, biases[i]);
    }
    const F sum = load(t.running.sum + row);
    store(t.running.sum + row, fma(sum, rescale, sums(each, rows)));
    if constexpr (Cells::kValueBiases) {
      const F bias = load(t.running.bias + row);
      store(t.running.bias + row, fma(bias, rescale, sums(biases, rows)));
    }
  }

  static constexpr int kOneByOne = kLanes / 4;  // rows reduced alone, to the same bits

  static __attribute__((always_inline)) F maxima(const F (&each)[kLanes], int rows) {
    if (rows > kOneByOne) return reduce_max_each(each);
    alignas(64) float to[kLanes] = {};
    for (int i = 0; i < rows; ++i) to[i] = reduce_max(each[i]);
    return load(to);
  }
  static __attribute__((always_inline)) F sums(const F (&each)[kLanes], int rows) {
    if (rows > kOneByOne) return reduce_add_each(each);
    alignas(64) float to[kLanes] = {};
    for (int i = 0; i < rows; ++i) to[i] = reduce_add(each[i]);
    return load(to);
  }

  // Scales, caps and masks a row's scores; returns their maxima.
  template <int kCount>
  static __attribute__((always_inline)) F mask_scores(Frame& t, int64_t tile, int row,
                                                      int vectors) {
    const int64_t lo = t.row_begin[row] - tile;
    const int64_t hi = t.row_end[row] - tile;
    const float cap = t.a.soft_cap * kLog2E;
    const bool whole = lo <= 0 && hi >= vectors * kLanes;
    const F unit = set1(kParts > 1 ? query_scale(t, row) : score_unit(t.a));
    if (whole && !(cap > 0.f)) {
      return each_score<kCount>(t, row, vectors, unit, [](F x, int) { return x; });
    }
    return each_score<kCount>(t, row, vectors, unit, [=](F x, int begin) {
      if (cap > 0.f) x = mul(tanh(x), set1(cap));
      if (whole) return x;
      return keep_range(x, static_cast<int>(larger(lo - begin, 0)),
                        static_cast<int>(larger(hi - begin, 0)));
    });
  }

  // finish(score, first state): what is left to do to a register of scores.
  template <int kCount, class Finish>
  static __attribute__((always_inline)) F each_score(Frame& t, int row, int vectors,
                                                     F unit, const Finish& finish) {
    const int count = kCount > 0 ? kCount : vectors;
    float* const scores = t.scores + row * kTileStates;
    F largest = set1(kLowestMax);
#pragma GCC unroll 4
    for (int v = 0; v < count; ++v) {
      F x = load(scores + v * kLanes);
      if constexpr (Cells::kKeyBiases) {
        x = fma(load(t.numbers.key_bias + v * kLanes), set1(t.query_sums[row]), x);
      }
      if constexpr (Cells::kKeyScales) {
        x = mul(x, load(t.numbers.key_scale + v * kLanes));
      }
      if constexpr (kParts > 1 || !Cells::kKeyScales) x = mul(x, unit);
      x = finish(x, v * kLanes);
      store(scores + v * kLanes, x);
      largest = max(largest, x);
    }
    return largest;
  }

  // Leaves 2^(score - max) as the row's probabilities; returns their sums, and those of
  // value biases. Asks for `lines` lines ahead per vector.
  template <int kCount>
  static __attribute__((always_inline)) F exponentiate(Frame& t, int row, int vectors,
                                                       int lines, F& biases) {
    const int count = kCount > 0 ? kCount : vectors;
    const F top = set1(t.running.max[row]);
    const float* const scores = t.scores + row * kTileStates;
    F weighed[kTileVectors];
    if constexpr (kParts > 1) {
      for (int v = count; v < kTileVectors; ++v) weighed[v] = set1(0.f);
    }
    F sum = set1(0.f);
    F bias = set1(0.f);
#pragma GCC unroll 4
    for (int v = 0; v < count; ++v) {
      if (lines > 0) {
        const uint8_t* const ahead = t.ahead.take(lines);
        for (int i = 0; i < lines; ++i) prefetch_line(ahead + i * kCacheLine);
      }
      F p = exp2(sub(load(scores + v * kLanes), top));
      sum = add(sum, p);
      if constexpr (Cells::kValueBiases) {
        bias = fma(p, load(t.numbers.value_bias + v * kLanes), bias);
      }
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
    if constexpr (Cells::kValueBiases) biases = bias;
    return sum;
  }
};

}  // namespace vllm_cpu::VLLM_ISA
