// What a cell format tells the attention template, with the answers of a format whose
// registers are units as they lie. A format derives from PlainCells and overrides.
//
// A *raw register* is kLanes times 32 bits of a cell. Packed formats expand it to
// several registers of units; queries and sums then hold their elements in the order
// that costs the least shuffling, and `load_query` and `finish` undo it.
#pragma once

#include "units.h"
#include "work.h"

namespace vllm_cpu::VLLM_ISA {

// Part of a page that holds some bytes of each state: state t of head h lies at
// base + h * head_stride + t * state_stride.
struct PageRun {
  int64_t base;
  int64_t head_stride;
  int64_t state_stride;
  int32_t bytes;        // of one state
};

// Per state of a tile: key = (codes + key_bias) * key_scale, and so on. Formats fill
// what they say they have.
struct StateNumbers {
  alignas(64) float key_scale[kTileStates];
  alignas(64) float key_bias[kTileStates];
  alignas(64) float value_scale[kTileStates];
  alignas(64) float value_bias[kTileStates];  // added to each element of a value
  alignas(64) float key_square[kTileStates];  // of the codes' length
};

struct NoTables {};

template <class UnitsOf>
struct PlainCells {
  using Units = UnitsOf;
  using Tables = NoTables;      // constants kept in registers while expanding

  static constexpr int kKeyExpand = 1;                  // registers of units per raw one
  static constexpr int kKeyGroup = 0;                   // raw units that share a scale
  static constexpr int kValueDots = 1;                  // units of probabilities and
  static constexpr int kValueRegs = UnitsOf::kElems;    // registers per group of states
  static constexpr int kFewRows = VLLM_ISA::kFewRows;   // rows multiplied in registers
  static constexpr bool kDecoded = false;               // cells become rows first
  static constexpr bool kPlaced = false;                // wants pages_here, places_here
  static constexpr bool kKeyScales = false;             // which StateNumbers there are
  static constexpr bool kKeyBiases = false;
  static constexpr bool kKeySquares = false;
  static constexpr bool kValueScales = false;
  static constexpr bool kValueBiases = false;
  static constexpr bool kFinishes = false;              // sums need `finish`

  // Cells one after another, each of `bytes`.
  PlainCells(const AttentionArgs& a, int64_t bytes)
      : run{0, a.pages.head_stride, a.pages.state_stride, static_cast<int32_t>(bytes)} {}

  static int64_t finish_floats(const AttentionArgs&) { return 0; }
  static int64_t decoded_bytes(const AttentionArgs&) { return 0; }
  int num_runs() const { return 1; }
  const PageRun& page_run(int) const { return run; }

  Tables tables() const { return {}; }

  VLLM_INLINE void expand_key(const Tables&, U raw, U (&units)[1]) { units[0] = raw; }

  // The head that starts at element `from` of the query's rows, as `units` units.
  void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) const {
    Units::load_query(to, query, from, units);
  }
  VLLM_INLINE void store_probabilities(uint32_t* to, F p) {
    Units::store_probabilities(to, p);
  }

  PageRun run;
};

}  // namespace vllm_cpu::VLLM_ISA
