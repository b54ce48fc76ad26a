// Products of a tile with many rows: states are unpacked once, to scratch memory, and
// multiplied in blocks of rows and registers.
#pragma once

#include "tile_few_rows.h"

namespace vllm_cpu::VLLM_ISA {

template <class Frame>
class ManyRows {
  using Cells = typename Frame::Cells;
  using Units = typename Frame::Units;
  static constexpr int kExpand = Cells::kKeyExpand;
  static constexpr int kGroup = Cells::kKeyGroup;

 public:
  static void score(Frame& t, int vectors) {
    for (int strip = 0; strip < vectors; ++strip) unpack_keys(t, strip);
    ProductArgs scores{};
    scores.c = t.scores;
    scores.c_row = kTileStates;
    scores.a = t.queries;
    scores.a_row = t.query_row;
    scores.a_part = t.key_row;
    scores.starts = Frame::kParts > 1 ? Frame::kParts * t.key_row : 0;
    scores.b = t.keys;
    scores.b_step = kLanes;
    scores.b_vector = t.key_row * kLanes;
    scores.steps = t.key_raws * kExpand;
    if constexpr (kGroup > 0) {
      scores.steps = kGroup * kExpand;
      scores.groups = t.key_raws / kGroup;
      scores.scales = t.group_scales;
      scores.scales_vector = t.strip_scales(1) - t.strip_scales(0);
      grouped_product<typename Units::Keys>(scores, t.rows, vectors);
    } else {
      product<typename Units::Keys>(scores, t.rows, vectors);
    }
  }

  static void sum(Frame& t, int states) {
    const int groups = (states + Frame::kGroupStates - 1) / Frame::kGroupStates;
    for (int group = 0; group < groups; ++group) unpack_values(t, group);
    ProductArgs sums{};
    sums.c = t.running.acc;
    sums.c_row = t.acc_row;
    sums.a = t.probabilities;
    sums.a_row = Frame::kParts * Frame::kRowUnits;
    sums.a_part = Frame::kRowUnits;
    sums.factors = t.factors;
    sums.b = t.values;
    sums.b_step = t.acc_row;
    sums.b_vector = kLanes;
    sums.steps = groups * Cells::kValueDots;
    sums.rescale = t.rescale;
    product<typename Units::Values>(sums, t.rows, t.value_vectors());
  }

 private:
  // One raw unit of a strip's states to its place.
  static __attribute__((always_inline)) void unpack(const Frame& t,
                                                    const typename Cells::Tables& tables,
                                                    uint32_t* to, int raw, U r,
                                                    F& square) {
    U units[kExpand];
    t.cells.expand_key(tables, r, units);
#pragma GCC unroll 4
    for (int j = 0; j < kExpand; ++j) {
      u_store(to + (raw * kExpand + j) * kLanes, units[j]);
      if constexpr (Cells::kKeySquares) square = Units::dot(square, units[j], units[j]);
    }
  }

  static __attribute__((noinline)) void unpack_keys(Frame& t, int strip) {
    uint32_t* const to = t.keys + strip * t.key_row * kLanes;
    const typename Cells::Tables tables = t.cells.tables();
    F square = set1(0.f);
    if constexpr (Cells::kTiled) {
      const uint8_t* const p = t.states.keys(strip);
      for (int raw = 0; raw < t.key_raws; ++raw) {
        const U r = t.cells.load_keys(tables, p + raw * Cells::kKeyBytes);
        ask_for<1>(t.ahead.take(1));
        unpack(t, tables, to, raw, r, square);
      }
      if constexpr (kGroup > 0) {
        for (int group = 0; group < t.key_raws / kGroup; ++group) {
          store(t.strip_scales(strip) + group * kLanes, t.cells.key_scales(p, group));
        }
      }
    } else {
      constexpr int kLines = lines_of(kLanes * Cells::kRegisterBytes);
      for (int raw = 0; raw < t.key_raws; raw += kLanes) {
        U r[kLanes];
        t.states.keys(strip, raw, r);
        ask_for<kLines>(t.ahead.take(kLines));
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) unpack(t, tables, to, raw + i, r[i], square);
      }
    }
    if constexpr (Cells::kKeySquares) {
      store(t.numbers.key_square + strip * kLanes, square);
    }
  }

  static __attribute__((noinline)) void unpack_values(Frame& t, int group) {
    constexpr int kDots = Cells::kValueDots;
    constexpr int kRegs = Cells::kValueRegs;
    const typename Cells::Tables tables = t.cells.tables();
    uint32_t* const to = t.values + group * kDots * t.acc_row;
    for (int elem = 0; elem < t.a.out.size; elem += Frame::kValueElems) {
      U r[kDots][kRegs];
      if constexpr (Cells::kTiled) {
        constexpr int kLines = lines_of(Cells::kGroupBytes * kRegs / Cells::kRegsPerLoad);
        const int left = t.a.out.size - elem;
        t.cells.load_values(tables, t.states.values(group), elem,
                            static_cast<int>(smaller(left, kRegs * kLanes)), r);
        ask_for<kLines>(t.ahead.take(kLines));
      } else {
        constexpr int kLines = lines_of(Cells::kValueGroupBytes);
        t.states.values(group, elem, r);
        ask_for<kLines>(t.ahead.take(kLines));
      }
      for (int d = 0; d < kDots; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i) {
          u_store(to + d * t.acc_row + elem + i * kLanes, r[d][i]);
        }
      }
    }
  }
};

}  // namespace vllm_cpu::VLLM_ISA
