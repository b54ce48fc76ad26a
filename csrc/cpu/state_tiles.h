// The states of a tile where kTurns of them lie together: registers are read as they
// are. Blocks hold whole tiles of the cache.
#pragma once

#include <string.h>

#include "cells.h"

namespace vllm_cpu::VLLM_ISA {

template <class Cells>
class StateTiles {
  using Units = typename Cells::Units;
  static constexpr int kStrips = kTileStates / kTurns;
  static constexpr int kGroupStates = Cells::kValueDots * Units::kElems;
  static constexpr int kGroups = kTileStates / kGroupStates;
  static constexpr int kStripGroups = kTurns / kGroupStates;

 public:
  // Values of no state, and of the groups that straddle the first and the last key.
  static int64_t scratch_floats(const AttentionArgs& a) {
    return 3 * group_floats(a);
  }

  StateTiles(const AttentionArgs& a, const WorkItem& w, const Cells& cells, float* scratch)
      : a_(a), w_(w), cells_(cells), spare_(reinterpret_cast<uint8_t*>(scratch)) {
    memset(spare_, 0, group_floats(a) * 4);
  }

  // Finds the tiles of the states from `tile` on. Those that hold no key that any row
  // sees repeat one that does: their pages may be freed. Values of unseen states are
  // read as 0, for they may be anything.
  void locate(int64_t tile) {
    const Pages& pages = a_.pages;
    const PageRun& run = cells_.page_run(0);
    const int32_t* const table = a_.block_table + w_.request * a_.block_table_stride;
    const int lead = static_cast<int>(larger(w_.keys.begin - tile, 0));
    const int end = static_cast<int>(smaller(kTileStates, w_.keys.end - tile));
    const int first = lead / kTurns;
    const int last = (end - 1) / kTurns;
    const uint8_t* const head = pages.data + w_.kv_head * run.head_stride;
    int64_t block = (tile + first * kTurns) / pages.block_size;
    int64_t in_block = (tile + first * kTurns) % pages.block_size;
    for (int strip = first; strip <= last; ++strip) {
      keys_[strip] = head + table[block] * pages.block_stride +
                     in_block * run.state_stride;
      in_block += kTurns;
      if (in_block < pages.block_size) continue;
      in_block = 0;
      ++block;
    }
    for (int strip = 0; strip < first; ++strip) keys_[strip] = keys_[first];
    for (int strip = last + 1; strip < kStrips; ++strip) keys_[strip] = keys_[last];
    point_to_values(lead, end);
  }

  const uint8_t* keys(int strip) const { return keys_[strip]; }
  const uint8_t* value_tile(int strip) const {
    return keys_[strip] + cells_.to_values();
  }

  ValueGroup values(int group) const {
    if constexpr (Cells::kValuesFinite) {
      const uint8_t* const tile = value_tile(group / kStripGroups);
      const int turn = group % kStripGroups * kGroupStates;
      return {tile + cells_.value_offset + turn * cells_.value_bytes, tile, turn};
    } else {
      return {values_[group], nullptr, 0};
    }
  }

  // Lanes of a strip that some row sees.
  uint32_t seen(int64_t tile, int strip) const {
    const int64_t lead = w_.keys.begin - tile - strip * kTurns;
    const int64_t end = w_.keys.end - tile - strip * kTurns;
    const uint32_t from = lead <= 0 ? 0xffff : lead >= kTurns ? 0 : 0xffff << lead;
    const uint32_t to = end >= kTurns ? 0xffff : end <= 0 ? 0 : (1 << end) - 1;
    return from & to;
  }

 private:
  static int64_t group_floats(const AttentionArgs& a) {
    return round_up(a.out.size, kTurns) + kTurns;
  }

  void point_to_values(int lead, int end) {
    if constexpr (!Cells::kValuesFinite) {
      const int64_t step = kGroupStates * cells_.value_bytes;
      for (int strip = 0; strip < kStrips; ++strip) {
        const uint8_t* const first = value_tile(strip) + cells_.value_offset;
#pragma GCC unroll 8
        for (int i = 0; i < kStripGroups; ++i) {
          values_[strip * kStripGroups + i] = first + i * step;
        }
      }
      if (lead == 0 && end == kTileStates) return;
      for (int group = 0; group < lead / kGroupStates; ++group) values_[group] = spare_;
      mask_group(lead / kGroupStates, lead, end, 1);
      mask_group((end - 1) / kGroupStates, lead, end, 2);
      for (int group = (end - 1) / kGroupStates + 1; group < kGroups; ++group) {
        values_[group] = spare_;
      }
    }
  }

  // Copies a group of states without those outside [lead, end).
  void mask_group(int group, int lead, int end, int copy) {
    const int begin = group * kGroupStates;
    if (lead <= begin && begin + kGroupStates <= end) return;
    uint32_t mask = 0;
    constexpr int kBits = 32 / kGroupStates;
    for (int i = 0; i < kGroupStates; ++i) {
      const bool seen = lead <= begin + i && begin + i < end;
      if (seen) mask |= (0xffffffffu >> (32 - kBits)) << i * kBits;
    }
    uint8_t* const to = spare_ + copy * group_floats(a_) * 4;
    for (int i = 0; i < a_.out.size; ++i) {
      uint32_t unit;
      memcpy(&unit, values_[group] + i * 4, 4);
      unit &= mask;
      memcpy(to + i * 4, &unit, 4);
    }
    values_[group] = to;
  }

  const AttentionArgs& a_;
  const WorkItem& w_;
  const Cells& cells_;
  uint8_t* const spare_;
  const uint8_t* keys_[kStrips];
  const uint8_t* values_[Cells::kValuesFinite ? 1 : kGroups];
};

}  // namespace vllm_cpu::VLLM_ISA
