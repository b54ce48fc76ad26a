// The states of a tile where each is a record of its own, in the cache or decoded from
// it: keys are transposed in registers as they are loaded.
#pragma once

#include "cells.h"

namespace vllm_cpu::VLLM_ISA {

template <class Cells>
class StateRows {
  using Units = typename Cells::Units;
  static constexpr int kElems = Units::kElems;
  static constexpr int kRegs = Cells::kValueRegs;

 public:
  static int64_t scratch_floats(const AttentionArgs& a) {
    return kTileStates * Cells::decoded_bytes(a) / 4;
  }

  StateRows(const AttentionArgs& a, const WorkItem& w, const Cells& cells, float* scratch)
      : a_(a), w_(w), cells_(cells), decoded_(reinterpret_cast<uint8_t*>(scratch)) {}

  // Finds the records of the states from `tile` on. Slots before the first key any row
  // sees or past the last repeat the nearest such key: their pages may be freed or
  // unwritten.
  void locate(int64_t tile) {
    const Pages& pages = a_.pages;
    const PageRun& run = cells_.page_run(0);
    const int64_t head = run.base + w_.kv_head * run.head_stride;
    const int32_t* const table = a_.block_table + w_.request * a_.block_table_stride;
    const int64_t begin = larger(tile, w_.keys.begin);
    int64_t block = begin / pages.block_size;
    int64_t in_block = begin % pages.block_size;
    int slot = static_cast<int>(begin - tile);
    const int end = static_cast<int>(smaller(kTileStates, w_.keys.end - tile));
    const int leading = slot;
    while (slot < end) {
      const uint8_t* const page = pages.data + table[block] * pages.block_stride;
      const uint8_t* record = page + head + in_block * run.state_stride;
      const int stop = static_cast<int>(smaller(end, slot + pages.block_size - in_block));
      int64_t place = w_.kv_head * static_cast<int64_t>(pages.block_size) + in_block;
      for (; slot < stop; ++slot, record += run.state_stride) {
        records_[slot] = record;
        if constexpr (Cells::kPlaced) {
          pages_[slot] = page;
          places_[slot] = static_cast<int32_t>(place++);
        }
      }
      in_block = 0;
      ++block;
    }
    for (int i = 0; i < leading; ++i) repeat(i, leading);
    for (int i = end; i < kTileStates; ++i) repeat(i, end - 1);
    if constexpr (Cells::kDecoded) decode(static_cast<int>(round_up(end, kLanes)));
  }

  // kLanes states, transposed: one raw register per raw unit of the head from `raw` on,
  // one lane per state.
  __attribute__((always_inline)) void keys(int strip, int raw, U (&r)[kLanes]) const {
    const uint8_t* const* const records = records_ + strip * kLanes;
    const int elem = raw * kElems;
    const int left = a_.query.size - elem;
    if (left >= kLanes * kElems) {  // the usual case, without masks
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        r[i] = cells_.load_key(records[i], elem, kLanes * kElems);
      }
    } else {
      for (int i = 0; i < kLanes; ++i) r[i] = cells_.load_key(records[i], elem, left);
    }
    transpose(r);
  }

  // kElems states, interleaved: one unit per element of the head, from `elem` on.
  __attribute__((always_inline)) void values(int group, int elem,
                                             U (&r)[1][kRegs]) const {
    const uint8_t* const* const records = records_ + group * kElems;
    const int left = a_.out.size - elem;
    if (left >= kRegs * kLanes) {
      cells_.load_values(records, elem, kRegs * kLanes, r);
    } else {
      cells_.load_values(records, elem, left, r);
    }
  }

 private:
  void repeat(int slot, int of) {
    records_[slot] = records_[of];
    if constexpr (Cells::kPlaced) {
      pages_[slot] = pages_[of];
      places_[slot] = places_[of];
    }
  }

  // Points the slots to rows made from their cells.
  void decode(int slots) {
    const uint8_t* last = nullptr;
    uint8_t* row = decoded_ - cells_.row_bytes;
    for (int i = 0; i < slots; ++i) {
      const uint8_t* const cell = records_[i];
      if (cell != last) {
        row += cells_.row_bytes;
        if constexpr (Cells::kPlaced) {
          cells_.decode({cell, pages_[i], places_[i]}, row);
        } else {
          cells_.decode(cell, row);
        }
      }
      last = cell;
      records_[i] = row;
    }
  }

  const AttentionArgs& a_;
  const WorkItem& w_;
  const Cells& cells_;
  uint8_t* const decoded_;  // [kTileStates, row_bytes]
  const uint8_t* records_[kTileStates];
  const uint8_t* pages_[Cells::kPlaced ? kTileStates : 1];
  int32_t places_[Cells::kPlaced ? kTileStates : 1];  // head * block_size + state
};

}  // namespace vllm_cpu::VLLM_ISA
