// What a format tells the attention template, with the answers of a format whose
// registers are units as they lie. A format derives from PlainCells (states one after
// another) or from TiledCells (the arrangement "tile16") and overrides.
//
// A *raw register* is kLanes times 32 bits of the cache. Packed formats expand it to
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

// What both kinds of formats answer.
template <class UnitsOf>
struct AnyCells {
  using Units = UnitsOf;
  using Tables = NoTables;      // constants kept in registers while expanding

  static constexpr int kKeyExpand = 1;                  // registers of units per raw one
  static constexpr int kKeyGroup = 0;                   // raw units that share a scale
  static constexpr int kValueDots = 1;                  // units of probabilities and
  static constexpr int kValueRegs = UnitsOf::kElems;    // registers per group of states
  static constexpr int kFewRows = VLLM_ISA::kFewRows;   // rows multiplied in registers
  static constexpr bool kDecoded = false;               // states become rows first
  static constexpr bool kPlaced = false;                // `decode` takes a State
  static constexpr bool kKeyScales = false;             // which StateNumbers there are
  static constexpr bool kKeyBiases = false;
  static constexpr bool kKeySquares = false;
  static constexpr bool kValueScales = false;
  static constexpr bool kValueBiases = false;
  static constexpr bool kFinishes = false;              // sums need `finish`

  static int64_t finish_floats(const AttentionArgs&) { return 0; }
  static int64_t decoded_bytes(const AttentionArgs&) { return 0; }

  Tables tables() const { return {}; }
  VLLM_INLINE void expand_key(const Tables&, U raw, U (&units)[1]) { units[0] = raw; }

  // The head that starts at element `from` of the query's rows, as `units` units.
  void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) const {
    Units::load_query(to, query, from, units);
  }
  VLLM_INLINE void store_probabilities(uint32_t* to, F p) {
    Units::store_probabilities(to, p);
  }
};

// Each state's bytes are one record. Formats add kRegisterBytes and kValueGroupBytes,
// what load_key and load_values take from the cache, and
//
//   U load_key(record, elem, count)       kLanes units from element `elem`, 0 past count
//   void load_values(records, elem, count, U (&units)[1][kValueRegs])
//                                         the same elements of Units::kElems states
//
// With kDecoded records are rows that `decode` made, of row_bytes each.
template <class UnitsOf>
struct PlainCells : AnyCells<UnitsOf> {
  static constexpr bool kTiled = false;

  PlainCells(const AttentionArgs& a, int64_t bytes)
      : run{0, a.pages.head_stride, a.pages.state_stride, static_cast<int32_t>(bytes)} {}

  int num_runs() const { return 1; }
  const PageRun& page_run(int) const { return run; }

  PageRun run;
};

constexpr int kTurns = 16;  // states of a tile of the cache that take turns

// kTurns states of a head, field by field. Keys: a register of one raw unit of each
// state after the other, from byte 0 of the tile on. Values: groups of states that share
// units, elements side by side. Formats add kKeyBytes and kValueBytes, of a raw register
// and of what load_values takes, and
//
//   U load_keys(tables, at)               a raw register: kTurns states
//   void load_values(tables, ValueGroup, elem, count, U (&units)[kValueDots][kRegs])
//   F key_scales(tile, group)             of kTurns states, with kKeyGroup
//   load_numbers(key_tile, value_tile, keep, v, StateNumbers&)
//                                         register v; lanes that `keep` lacks become 0
//   finish(acc, bias, to)                 sums in the order of elements
template <class UnitsOf>
struct TiledCells : AnyCells<UnitsOf> {
  static constexpr bool kTiled = true;
  static constexpr bool kValuesInOrder = true;  // registers hold elements in order
  static constexpr bool kValuesFinite = false;  // whatever bytes there are
  static constexpr int kGroupBytes = 64;        // of a register of values

  // sides: head slots of a head, `side_bytes` of a state in each; values start
  // `value_region` bytes per state into the last one.
  TiledCells(const AttentionArgs& a, int sides, int64_t side_bytes, int64_t value_region,
             int64_t value_bytes)
      : value_offset(kTurns * value_region),
        value_bytes(value_bytes),
        num_sides(sides) {
    const int64_t side = a.pages.num_heads * a.pages.head_stride;
    for (int i = 0; i < sides; ++i) {
      runs[i] = {i * side, a.pages.head_stride, a.pages.state_stride,
                 static_cast<int32_t>(side_bytes)};
    }
  }

  int num_runs() const { return num_sides; }
  const PageRun& page_run(int i) const { return runs[i]; }
  // From a tile of keys to its values' tile.
  int64_t to_values() const { return runs[num_sides - 1].base; }

  int64_t value_offset;  // of the first group in a tile
  int64_t value_bytes;   // of a state
  int num_sides;
  PageRun runs[2];
};

// Where some states' values lie: their codes, their whole tile, and their first turn.
struct ValueGroup {
  const uint8_t* codes;
  const uint8_t* tile;
  int turn;
};

}  // namespace vllm_cpu::VLLM_ISA
