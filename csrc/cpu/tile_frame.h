// What the steps of one piece of attention share: sizes, scratch memory and where the
// states of the tile at hand lie.
#pragma once

#include <type_traits>

#include "prefetch.h"
#include "softmax_state.h"
#include "state_rows.h"
#include "state_tiles.h"

namespace vllm_cpu::VLLM_ISA {

template <class CellsOf>
struct TileFrame {
  using Cells = CellsOf;
  using Units = typename Cells::Units;
  using States =
      std::conditional_t<Cells::kTiled, StateTiles<Cells>, StateRows<Cells>>;
  static constexpr int kElems = Units::kElems;
  static constexpr int kParts = Units::kParts;
  static constexpr int kRowUnits = kTileStates / kElems;  // of a part of probabilities
  static constexpr int kUnitElems = kElems * Cells::kKeyExpand;  // of a raw unit
  static constexpr int kGroupStates = Cells::kValueDots * kElems;
  static constexpr int kValueElems = Cells::kValueRegs * kLanes;

  static int64_t partial_floats(const AttentionArgs& a, int rows) {
    return SoftmaxState::floats(rows, acc_row_floats(a));
  }

  static int64_t scratch_bytes(const AttentionArgs& a) {
    const int64_t key_row = key_row_units(a);
    const int64_t floats = kMaxRows * (query_units(key_row) + 2 * kTileStates) +
                           kTileStates * (key_row + acc_row_floats(a)) +
                           2 * partial_floats(a, kMaxRows) + 10 * kRowSlots +
                           group_scale_floats(a) + Cells::finish_floats(a) +
                           States::scratch_floats(a) + 2 * kTileStates;
    return floats * 4;
  }

  TileFrame(const AttentionArgs& args, const WorkItem& item, const WorkItem* next,
            float* scratch)
      : a(args),
        w(item),
        cells(args),
        rows(item.row_end - item.row_begin),
        group(args.num_query_heads / args.pages.num_heads),
        key_raws(raw_units(args)),
        key_row(key_row_units(args)),
        query_row(query_units(key_row)),
        acc_row(acc_row_floats(args)),
        ahead(args, item, next, cells, scratch),
        states(args, item, cells, carve(scratch, States::scratch_floats(args))) {
    queries = units(scratch, rows * query_row);
    keys = units(scratch, kTileStates * key_row);
    values = units(scratch, kTileStates / kElems * acc_row);
    probabilities = units(scratch, rows * kParts * kRowUnits);
    scores = carve(scratch, rows * kTileStates);
    rescale = carve(scratch, kRowSlots);
    weight = carve(scratch, kRowSlots);
    query_sums = carve(scratch, kRowSlots);
    factors = carve(scratch, kRowSlots);
    group_scales = carve(scratch, group_scale_floats(a));
    finished = carve(scratch, Cells::finish_floats(a));
    total = SoftmaxState(carve(scratch, partial_floats(a, rows)), rows, acc_row);
    running = SoftmaxState(carve(scratch, partial_floats(a, rows)), rows, acc_row);
    find_key_ranges();
  }

  int64_t token_of(int row) const {
    return a.query_start_loc[w.request] + (w.row_begin + row) / group;
  }
  int64_t head_of(int row) const {
    return static_cast<int64_t>(w.kv_head) * group + (w.row_begin + row) % group;
  }

  float* strip_scales(int strip) const {
    return group_scales + strip * (group_scale_floats(a) / (kTileStates / kLanes));
  }

  // Registers of sums that hold an element.
  int value_vectors() const {
    if constexpr (Cells::kTiled) {
      if (!Cells::kValuesInOrder) {
        return static_cast<int>(round_up(a.out.size, kValueElems) / kLanes);
      }
    }
    return (a.out.size + kLanes - 1) / kLanes;
  }

  const AttentionArgs& a;
  const WorkItem& w;
  const Cells cells;
  const int rows;
  const int group;          // query heads per KV head
  const int key_raws;       // raw units of a key
  const int64_t key_row;    // units of a key, rounded up to whole registers
  const int64_t query_row;  // units of a query with all its parts
  const int64_t acc_row;
  Prefetcher ahead;
  States states;
  uint32_t* queries;        // [rows, query_row]
  uint32_t* keys;           // [strips, key_row, kLanes]
  uint32_t* values;         // [kTileStates / kElems, acc_row]
  uint32_t* probabilities;  // [rows, parts, kTileStates / kElems]
  float* scores;            // [rows, kTileStates]
  float* rescale;
  float* weight;
  float* query_sums;
  float* factors;           // [rows]: of probabilities in whole numbers
  float* group_scales;      // [strips, groups, kLanes]
  float* finished;
  SoftmaxState total;
  SoftmaxState running;
  int32_t row_begin[kMaxRows];  // keys that each row sees
  int32_t row_end[kMaxRows];
  StateNumbers numbers;

 private:
  static float* carve(float*& scratch, int64_t floats) {
    float* const p = scratch;
    scratch += round_up(floats, 16);
    return p;
  }
  static uint32_t* units(float*& scratch, int64_t count) {
    return reinterpret_cast<uint32_t*>(carve(scratch, count));
  }

  static int64_t acc_row_floats(const AttentionArgs& a) {
    return round_up(a.out.size, larger(2 * kLanes, kValueElems));
  }
  static int raw_units(const AttentionArgs& a) {
    return (a.query.size + kUnitElems - 1) / kUnitElems;
  }
  static int64_t key_row_units(const AttentionArgs& a) {
    return round_up(raw_units(a), kLanes) * Cells::kKeyExpand;
  }
  // Its parts, then what its sums start from and its scale where there are two.
  static int64_t query_units(int64_t key_row) {
    return kParts * key_row + (kParts > 1 ? kLanes : 0);
  }
  static int64_t group_scale_floats(const AttentionArgs& a) {
    if constexpr (Cells::kKeyGroup == 0) return 0;
    return kTileStates * round_up(raw_units(a) / larger(1, Cells::kKeyGroup), 16);
  }

  void find_key_ranges() {
    const int64_t seq_len = a.seq_lens[w.request];
    const int64_t past = seq_len - a.query_start_loc[w.request + 1];
    for (int row = 0; row < rows; ++row) {
      const KeyRange range = key_range(a, seq_len, past + token_of(row));
      row_begin[row] = static_cast<int32_t>(range.begin);
      row_end[row] = static_cast<int32_t>(range.end);
    }
  }
};

}  // namespace vllm_cpu::VLLM_ISA
