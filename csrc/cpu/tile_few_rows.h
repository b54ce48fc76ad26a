// Products of a tile with few rows: states are multiplied as they are unpacked, in
// registers. Sums run in the same order as in tile_many_rows.h, to the same bits.
#pragma once

#include "product.h"
#include "tile_frame.h"

namespace vllm_cpu::VLLM_ISA {

// Lines of the tile ahead to ask for while some bytes of this one are multiplied: three
// for four that these came from, at least one.
constexpr int lines_of(int bytes) {
  return bytes > kCacheLine ? (bytes * 3 / 4 + kCacheLine - 1) / kCacheLine : 1;
}

template <int kLines>
VLLM_INLINE void ask_for(const uint8_t* lines) {
#pragma GCC unroll 16
  for (int i = 0; i < kLines; ++i) prefetch_line(lines + i * kCacheLine);
}

// The sums of some rows with the keys of kStrips registers of states.
template <class Frame, int kRows, int kStrips>
struct Scores {
  using Cells = typename Frame::Cells;
  using Units = typename Frame::Units;
  using KeyUnits = typename Units::Keys;
  using Sum = typename Units::Sum;
  static constexpr int kExpand = Cells::kKeyExpand;
  static constexpr bool kGrouped = Cells::kKeyGroup > 0;

  const uint32_t* const queries;
  const int64_t query_row;
  const int64_t query_part;
  Sum acc[kStrips][kRows];
  Sum part[kGrouped ? kStrips : 1][kGrouped ? kRows : 1];
  F square[Cells::kKeySquares ? kStrips : 1];

  __attribute__((always_inline)) explicit Scores(const Frame& t)
      : queries(t.queries), query_row(t.query_row), query_part(t.key_row) {
    ProductArgs starts = start_args(t);
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        acc[s][row] = start_of<KeyUnits>(starts, nullptr, row);
        if constexpr (kGrouped) part[s][row] = set1(0.f);
      }
      if constexpr (Cells::kKeySquares) square[s] = set1(0.f);
    }
  }

  static ProductArgs start_args(const Frame& t) {
    ProductArgs starts{};
    starts.a = t.queries;
    starts.a_row = t.query_row;
    starts.starts = Frame::kParts * t.key_row;
    return starts;
  }

  // Raw unit `raw` of the states of each strip.
  __attribute__((always_inline)) void add(const typename Cells::Tables& tables,
                                          const Cells& cells, int raw,
                                          const U (&raws)[kStrips]) {
    U units[kStrips][kExpand];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) cells.expand_key(tables, raws[s], units[s]);
#pragma GCC unroll 4
    for (int j = 0; j < kExpand; ++j) {
      if constexpr (Cells::kKeySquares) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          square[s] = Units::dot(square[s], units[s][j], units[s][j]);
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const uint32_t* const query = queries + row * query_row + raw * kExpand + j;
        if constexpr (kStrips == 1) {
          Units::add_one(kGrouped ? part[0][row] : acc[0][row], units[0][j], query,
                         query_part);
        } else {
          const typename Units::Factor factor = Units::factor(query, query_part);
#pragma GCC unroll 4
          for (int s = 0; s < kStrips; ++s) {
            KeyUnits::add(kGrouped ? part[s][row] : acc[s][row], units[s][j], factor);
          }
        }
      }
    }
  }

  // Ends a group of raw units that share a scale.
  __attribute__((always_inline)) void end_group(int strip, F scale) {
    if constexpr (kGrouped) {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        acc[strip][row] = fma(part[strip][row], scale, acc[strip][row]);
        part[strip][row] = set1(0.f);
      }
    }
  }

  __attribute__((always_inline)) void store_to(Frame& t, int strip) const {
    const ProductArgs starts = start_args(t);
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      if constexpr (Cells::kKeySquares) {
        store(t.numbers.key_square + (strip + s) * kLanes, square[s]);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        store(t.scores + row * kTileStates + (strip + s) * kLanes,
              end_of<KeyUnits>(starts, acc[s][row], nullptr, row));
      }
    }
  }
};

// Strips from `strip` on, of states that lie one by one.
template <class Frame, int kRows>
static __attribute__((noinline)) void score_rows(Frame& t, int strip) {
  using Cells = typename Frame::Cells;
  constexpr int kLines = lines_of(kLanes * Cells::kRegisterBytes);
  const typename Cells::Tables tables = t.cells.tables();
  const int raws = t.key_raws;
  Scores<Frame, kRows, 1> scores(t);
  for (int raw = 0; raw < raws; raw += kLanes) {
    U r[kLanes];
    t.states.keys(strip, raw, r);
    const uint8_t* const ahead = t.ahead.take(kLines);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {  // units past the head are 0
      if ((i + 1) * kLines / kLanes > i * kLines / kLanes) {
        prefetch_line(ahead + i * kLines / kLanes * kCacheLine);
      }
      scores.add(tables, t.cells, raw + i, {r[i]});
    }
  }
  scores.store_to(t, strip);
}

// kStrips strips of states that take turns.
template <class Frame, int kRows, int kStrips>
static __attribute__((noinline)) void score_tiles(Frame& t, int strip) {
  using Cells = typename Frame::Cells;
  constexpr int kBytes = Cells::kKeyBytes;
  constexpr int kBlock = 4;
  constexpr int kLines = lines_of(kStrips * kBlock * kBytes);
  constexpr int kGroup = Cells::kKeyGroup > 0 ? Cells::kKeyGroup : 1 << 30;
  const typename Cells::Tables tables = t.cells.tables();
  const int raws = t.key_raws;
  const uint8_t* p[kStrips];
  for (int s = 0; s < kStrips; ++s) p[s] = t.states.keys(strip + s);
  Scores<Frame, kRows, kStrips> scores(t);
  const auto add = [&](int raw) __attribute__((always_inline)) {
    U r[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      r[s] = t.cells.load_keys(tables, p[s] + raw * kBytes);
    }
    scores.add(tables, t.cells, raw, r);
  };
  const auto end_group = [&](int raw) __attribute__((always_inline)) {
    if constexpr (Cells::kKeyGroup > 0) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        scores.end_group(s, t.cells.key_scales(p[s], raw / kGroup));
      }
    }
  };
  int raw = 0;
  for (; raw + kBlock <= raws; raw += kBlock) {
    const uint8_t* const ahead = t.ahead.take(kLines);
#pragma GCC unroll 4
    for (int i = 0; i < kBlock; ++i) {
#pragma GCC unroll 4
      for (int line = i * kLines / kBlock; line < (i + 1) * kLines / kBlock; ++line) {
        prefetch_line(ahead + line * kCacheLine);
      }
      add(raw + i);
      if ((i + 1) % kGroup == 0) end_group(raw + i);
    }
  }
  for (; raw < raws; ++raw) {
    add(raw);
    if ((raw + 1) % kGroup == 0) end_group(raw);
  }
  scores.store_to(t, strip);
}

template <class Frame, int kRows, int kRegs>
static __attribute__((noinline)) void sum_values(Frame& t, int elem, int groups) {
  using Cells = typename Frame::Cells;
  using Units = typename Frame::Units;
  using ValueUnits = typename Units::Values;
  constexpr int kDots = Cells::kValueDots;
  constexpr int kRowUnits = Frame::kRowUnits;
  const uint32_t* const probabilities = t.probabilities;
  const typename Cells::Tables tables = t.cells.tables();
  typename Units::Sum acc[kRows][kRegs];
  ProductArgs sums{};
  sums.rescale = t.rescale;
  sums.factors = t.factors;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i) {
      const float* const c = t.running.acc + row * t.acc_row + elem + i * kLanes;
      acc[row][i] = start_of<ValueUnits>(sums, c, row);
    }
  }
  const int left = t.a.out.size - elem;
  for (int group = 0; group < groups; ++group) {
    U r[kDots][kRegs];
    if constexpr (Cells::kTiled) {
      constexpr int kLines = lines_of(Cells::kGroupBytes * kRegs / Cells::kRegsPerLoad);
      const ValueGroup values = t.states.values(group);
      if (left >= kRegs * kLanes) {
        t.cells.load_values(tables, values, elem, kRegs * kLanes, r);
      } else {
        t.cells.load_values(tables, values, elem, left, r);
      }
      ask_for<kLines>(t.ahead.take(kLines));
    } else {
      constexpr int kLines = lines_of(Cells::kValueGroupBytes);
      constexpr int kGroupsPerLine =
          kCacheLine > Cells::kValueGroupBytes ? kCacheLine / Cells::kValueGroupBytes : 1;
      t.states.values(group, elem, r);
      if (group % kGroupsPerLine == 0) ask_for<kLines>(t.ahead.take(kLines));
    }
#pragma GCC unroll 2
    for (int d = 0; d < kDots; ++d) {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const typename Units::Factor p = Units::factor(
            probabilities + row * Frame::kParts * kRowUnits + group * kDots + d, kRowUnits);
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i) ValueUnits::add(acc[row][i], r[d][i], p);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i) {
      float* const c = t.running.acc + row * t.acc_row + elem + i * kLanes;
      store(c, end_of<ValueUnits>(sums, acc[row][i], c, row));
    }
  }
}

// Both products of a tile for exactly kRows rows, or the next smaller number there is.
template <class Frame>
class FewRows {
  using Cells = typename Frame::Cells;

 public:
  template <int kRows = Cells::kFewRows>
  static void score(Frame& t, int vectors) {
    if constexpr (kRows > 1) {
      if (t.rows != kRows) return score<kRows - 1>(t, vectors);
    }
    int strip = 0;
    if constexpr (Cells::kTiled) {
      constexpr bool kWide = Frame::kParts > 1 || Cells::kKeyGroup > 0 || kRows > 4;
      constexpr int kStrips = kWide ? 2 : 4;
      for (; strip + kStrips <= vectors; strip += kStrips) {
        score_tiles<Frame, kRows, kStrips>(t, strip);
      }
      for (; strip < vectors; ++strip) score_tiles<Frame, kRows, 1>(t, strip);
    } else {
      for (; strip < vectors; ++strip) score_rows<Frame, kRows>(t, strip);
    }
  }

  template <int kRows = Cells::kFewRows>
  static void sum(Frame& t, int states) {
    if constexpr (kRows > 1) {
      if (t.rows != kRows) return sum<kRows - 1>(t, states);
    }
    const int groups = (states + Frame::kGroupStates - 1) / Frame::kGroupStates;
    if constexpr (in_order()) {
      constexpr int kRegs = kRows > 4 && Cells::kValueRegs > 2 ? 2 : Cells::kValueRegs;
      const int end = t.value_vectors();
      int v = 0;
      for (; v + kRegs <= end; v += kRegs) {
        sum_values<Frame, kRows, kRegs>(t, v * kLanes, groups);
      }
      for (; v < end; ++v) sum_values<Frame, kRows, 1>(t, v * kLanes, groups);
    } else {
      for (int elem = 0; elem < t.a.out.size; elem += Frame::kValueElems) {
        sum_values<Frame, kRows, Cells::kValueRegs>(t, elem, groups);
      }
    }
  }

 private:
  static constexpr bool in_order() {
    if constexpr (Cells::kTiled) return Cells::kValuesInOrder;
    return false;
  }
};

}  // namespace vllm_cpu::VLLM_ISA
