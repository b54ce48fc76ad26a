// Attention of one tile of rows over paged keys and values, written once for every cell
// format: tiles of 64 states are multiplied as they are unpacked, or unpacked to scratch
// where many rows read them, and folded into a running softmax (fp32). A format
// supplies `Cells`, derived from PlainCells (cells.h), with
//
//   explicit Cells(const AttentionArgs&);
//   U load_key(cell, elem, count)         a raw register from element `elem`, 0 past count
//   void load_values(tables, cells, elem, count, U (&units)[kValueDots][kValueRegs])
//                                         the same elements of a group of states
//
// and what its constants promise:
//
//   kDecoded      decode(cell, row); int64_t row_bytes;     loads then read the row
//   kKeyGroup     load_group_scales(cells, pages, places, to);   [groups, kLanes]
//   kKeyScales... load_numbers(cells, count, StateNumbers&)
//   kFinishes     finish(acc, bias, to)   sums in the order of elements
#pragma once

#include "cells.h"
#include "prefetch.h"
#include "product.h"
#include "softmax_state.h"
#include "work.h"

namespace vllm_cpu::VLLM_ISA {

template <class Cells>
class TileAttention {
  using Units = typename Cells::Units;
  using Tables = typename Cells::Tables;
  using KeyUnits = typename Units::Keys;
  using ValueUnits = typename Units::Values;
  using Sum = typename Units::Sum;
  static constexpr int kElems = Units::kElems;
  static constexpr int kParts = Units::kParts;
  static constexpr int kRowUnits = kTileStates / kElems;  // of a part of probabilities
  static constexpr int kExpand = Cells::kKeyExpand;
  static constexpr int kKeyElems = kLanes * kElems * kExpand;  // of a raw register
  static constexpr int kDots = Cells::kValueDots;
  static constexpr int kRegs = Cells::kValueRegs;
  static constexpr int kGroupStates = kDots * kElems;
  static constexpr int kValueElems = kRegs * kLanes;

 public:
  static int64_t partial_floats(const AttentionArgs& a, int rows) {
    return SoftmaxState::floats(rows, acc_row_floats(a));
  }

  static int64_t scratch_bytes(const AttentionArgs& a) {
    const int64_t key_row = key_row_units(a);
    const int64_t floats = kMaxRows * (query_units(key_row) + 2 * kTileStates) +
                           kTileStates * (key_row + acc_row_floats(a)) +
                           2 * partial_floats(a, kMaxRows) + 9 * kRowSlots +
                           group_scale_floats(a) + Cells::finish_floats(a) +
                           kTileStates * Cells::decoded_bytes(a) / 4;
    return floats * 4;
  }

  static void attend(const AttentionArgs& a, const WorkItem& w, const WorkItem* next,
                     void* scratch) {
    TileAttention tile(a, w, next, static_cast<float*>(scratch));
    tile.load_queries();
    tile.total_.reset();
    for (int chunk = w.chunk_begin; chunk < w.chunk_end; ++chunk) {
      if (w.partials != nullptr) {
        tile.running_ = tile.partial(chunk);
        tile.run_chunk(chunk);
      } else {
        tile.run_chunk(chunk);
        tile.fold(tile.running_);
      }
    }
    if (w.partials == nullptr) tile.write_rows();
  }

  static void merge(const AttentionArgs& a, const WorkItem& w, void* scratch) {
    TileAttention tile(a, w, nullptr, static_cast<float*>(scratch));
    tile.total_.reset();
    for (int chunk = w.chunk_begin; chunk < w.chunk_end; ++chunk) {
      tile.fold(tile.partial(chunk));
    }
    tile.write_rows();
  }

  static constexpr AttentionKernel kernel() {
    return {scratch_bytes, partial_floats, attend, merge};
  }

 private:
  static int64_t value_floats(const AttentionArgs& a) {
    return round_up(a.out.size, larger(2 * kLanes, kValueElems));
  }
  // A row of sums, and its sum of value biases in a register of its own.
  static int64_t acc_row_floats(const AttentionArgs& a) {
    return value_floats(a) + (Cells::kValueBiases ? kLanes : 0);
  }
  static int key_raws(const AttentionArgs& a) {
    return (a.query.size + kElems * kExpand - 1) / (kElems * kExpand);
  }
  static int64_t key_row_units(const AttentionArgs& a) {
    return round_up(key_raws(a), kLanes) * kExpand;
  }
  // Its parts, then what its sums start from and its scale where there are two.
  static int64_t query_units(int64_t key_row) {
    return kParts * key_row + (kParts > 1 ? kLanes : 0);
  }
  static int64_t group_scale_floats(const AttentionArgs& a) {
    if constexpr (Cells::kKeyGroup == 0) return 0;
    return kTileStates * round_up(key_raws(a) / larger(1, Cells::kKeyGroup), 16);
  }

  TileAttention(const AttentionArgs& a, const WorkItem& w, const WorkItem* next,
                float* scratch)
      : a_(a),
        w_(w),
        cells_(a),
        rows_(w.row_end - w.row_begin),
        group_(a.num_query_heads / a.pages.num_heads),
        head_size_(a.query.size),
        head_size_v_(a.out.size),
        key_raws_(key_raws(a)),
        key_row_(key_row_units(a)),
        query_row_(query_units(key_row_)),
        acc_row_(acc_row_floats(a)),
        first_(w.keys.begin),
        last_(w.keys.end),
        ahead_(a, w, next, cells_, scratch) {
    const auto carve = [&scratch](int64_t floats) {
      float* const p = scratch;
      scratch += round_up(floats, 16);
      return p;
    };
    const auto units = [&](int64_t n) { return reinterpret_cast<uint32_t*>(carve(n)); };
    queries_ = units(rows_ * query_row_);
    keys_ = units(kTileStates * key_row_);
    values_ = units(kTileStates / kElems * acc_row_);
    probabilities_ = units(rows_ * kParts * kRowUnits);
    scores_ = carve(rows_ * kTileStates);
    rescale_ = carve(kRowSlots);
    weight_ = carve(kRowSlots);
    query_sums_ = carve(kRowSlots);
    factors_ = carve(kRowSlots);
    group_scales_ = carve(group_scale_floats(a));
    finished_ = carve(Cells::finish_floats(a));
    decoded_ = reinterpret_cast<uint8_t*>(
        carve(kTileStates * Cells::decoded_bytes(a) / 4));
    total_ = SoftmaxState(carve(partial_floats(a, rows_)), rows_, acc_row_);
    running_ = SoftmaxState(carve(partial_floats(a, rows_)), rows_, acc_row_);
    find_key_ranges();
  }

  SoftmaxState partial(int chunk) const {
    const int64_t index = chunk - w_.chunk_begin;
    return SoftmaxState(w_.partials + index * partial_floats(a_, rows_), rows_, acc_row_);
  }

  void fold(const SoftmaxState& chunk) { total_.fold(chunk, rescale_, weight_); }

  int64_t token_of(int row) const {
    return a_.query_start_loc[w_.request] + (w_.row_begin + row) / group_;
  }
  int64_t head_of(int row) const {
    return static_cast<int64_t>(w_.kv_head) * group_ + (w_.row_begin + row) % group_;
  }

  void find_key_ranges() {
    const int64_t seq_len = a_.seq_lens[w_.request];
    const int64_t past = seq_len - a_.query_start_loc[w_.request + 1];
    for (int row = 0; row < rows_; ++row) {
      const KeyRange range = key_range(a_, seq_len, past + token_of(row));
      row_begin_[row] = static_cast<int32_t>(range.begin);
      row_end_[row] = static_cast<int32_t>(range.end);
    }
  }

  void load_queries() {
    for (int row = 0; row < rows_; ++row) {
      const int64_t from = token_of(row) * a_.query.token_stride +
                           head_of(row) * a_.query.head_stride;
      uint32_t* const to = queries_ + row * query_row_;
      cells_.load_query(to, a_.query, from, key_row_);
      if constexpr (Cells::kKeyBiases) {
        F sum = set1(0.f);
        for (int i = 0; i < key_row_; i += kLanes) {
          sum = Units::dot(sum, u_load(to + i), Units::ones());
        }
        query_sums_[row] = reduce_add(sum);
      }
    }
  }

  void run_chunk(int chunk) {
    running_.reset();
    const int64_t chunk_begin = static_cast<int64_t>(chunk) * kChunkStates;
    const int64_t begin = larger(chunk_begin, first_ / kTileStates * kTileStates);
    const int64_t end = smaller(chunk_begin + kChunkStates, last_);
    for (int64_t tile = begin; tile < end; tile += kTileStates) run_tile(tile);
  }

  // Cells of the states from `tile` on. Slots before the first key any row sees or past
  // the last repeat the nearest such key: their pages may be freed or unwritten.
  void locate(int64_t tile) {
    const Pages& pages = a_.pages;
    const PageRun& run = cells_.page_run(0);
    const int64_t head = run.base + w_.kv_head * run.head_stride;
    const int32_t* const table = a_.block_table + w_.request * a_.block_table_stride;
    const int64_t begin = larger(tile, first_);
    int64_t block = begin / pages.block_size;
    int64_t in_block = begin % pages.block_size;
    int slot = static_cast<int>(begin - tile);
    const int end = static_cast<int>(smaller(kTileStates, last_ - tile));
    const int leading = slot;
    while (slot < end) {
      const uint8_t* const page = pages.data + table[block] * pages.block_stride;
      const uint8_t* cell = page + head + in_block * run.state_stride;
      const int stop = static_cast<int>(smaller(end, slot + pages.block_size - in_block));
      int64_t place = w_.kv_head * static_cast<int64_t>(pages.block_size) + in_block;
      for (; slot < stop; ++slot, cell += run.state_stride) {
        cells_here_[slot] = cell;
        if constexpr (Cells::kPlaced) {
          pages_here_[slot] = page;
          places_here_[slot] = static_cast<int32_t>(place++);
        }
      }
      in_block = 0;
      ++block;
    }
    for (int i = 0; i < leading; ++i) repeat(i, leading);
    for (int i = end; i < kTileStates; ++i) repeat(i, end - 1);
  }

  void repeat(int slot, int of) {
    cells_here_[slot] = cells_here_[of];
    if constexpr (Cells::kPlaced) {
      pages_here_[slot] = pages_here_[of];
      places_here_[slot] = places_here_[of];
    }
  }

  void run_tile(int64_t tile) {
    const int states = static_cast<int>(smaller(kTileStates, last_ - tile));
    const int vectors = (states + kLanes - 1) / kLanes;
    locate(tile);
    ahead_.start_tile(tile);
    if constexpr (Cells::kDecoded) decode_cells(vectors * kLanes);

    if (rows_ <= Cells::kFewRows) {
      few_rows<1>(tile, states, vectors);
    } else {
      many_rows(tile, states, vectors);
    }
  }

  // Points the slots to rows made from their cells.
  void decode_cells(int slots) {
    const uint8_t* last = nullptr;
    uint8_t* row = decoded_ - cells_.row_bytes;
    for (int i = 0; i < slots; ++i) {
      const uint8_t* const cell = cells_here_[i];
      if (cell != last) {
        row += cells_.row_bytes;
        if constexpr (Cells::kPlaced) {
          cells_.decode({cell, pages_here_[i], places_here_[i]}, row);
        } else {
          cells_.decode(cell, row);
        }
      }
      last = cell;
      cells_here_[i] = row;
    }
  }

  // Unpacks to scratch first: every row then reads the unpacked states.
  void many_rows(int64_t tile, int states, int vectors) {
    for (int strip = 0; strip < vectors; ++strip) unpack_keys(strip);
    ProductArgs scores{};
    scores.c = scores_;
    scores.c_row = kTileStates;
    scores.a = queries_;
    scores.a_row = query_row_;
    scores.a_part = key_row_;
    scores.starts = kParts > 1 ? kParts * key_row_ : 0;
    scores.b = keys_;
    scores.b_step = kLanes;
    scores.b_vector = key_row_ * kLanes;
    scores.steps = key_raws_ * kExpand;
    if constexpr (Cells::kKeyGroup > 0) {
      scores.steps = Cells::kKeyGroup * kExpand;
      scores.scales = group_scales_;
      scores.scales_vector = group_scale_floats(a_) / (kTileStates / kLanes);
      clear_scores(vectors);
      for (int raw = 0; raw < key_raws_; raw += Cells::kKeyGroup) {
        product<KeyUnits>(scores, rows_, vectors);
        scores.a += scores.steps;
        scores.b += scores.steps * kLanes;
        scores.scales += kLanes;
      }
    } else {
      product<KeyUnits>(scores, rows_, vectors);
    }

    softmax(tile, vectors);

    const int groups = (states + kGroupStates - 1) / kGroupStates;
    for (int group = 0; group < groups; ++group) unpack_values(group);
    ProductArgs sums{};
    sums.c = running_.acc;
    sums.c_row = acc_row_;
    sums.a = probabilities_;
    sums.a_row = kParts * kRowUnits;
    sums.a_part = kRowUnits;
    sums.factors = factors_;
    sums.b = values_;
    sums.b_step = acc_row_;
    sums.b_vector = kLanes;
    sums.steps = groups * kDots;
    sums.rescale = rescale_;
    product<ValueUnits>(sums, rows_, value_vectors());
  }

  // Registers of sums that hold an element.
  int value_vectors() const {
    if constexpr (kValueElems == kElems * kLanes) {
      return (head_size_v_ + kLanes - 1) / kLanes;
    }
    return static_cast<int>(round_up(head_size_v_, kValueElems) / kLanes);
  }

  void clear_scores(int vectors) {
    for (int row = 0; row < rows_; ++row) {
      for (int v = 0; v < vectors; ++v) {
        store(scores_ + row * kTileStates + v * kLanes, set1(0.f));
      }
    }
  }

  // Multiplies states as they are unpacked, in registers; sums in the same order as
  // many_rows, to the same bits.
  template <int kRows>
  void few_rows(int64_t tile, int states, int vectors) {
    if constexpr (kRows < Cells::kFewRows) {
      if (rows_ != kRows) return few_rows<kRows + 1>(tile, states, vectors);
    }
    for (int strip = 0; strip < vectors; ++strip) score_strip<kRows>(strip);
    softmax(tile, vectors);
    const int groups = (states + kGroupStates - 1) / kGroupStates;
    for (int elem = 0; elem < head_size_v_; elem += kValueElems) {
      sum_values<kRows>(elem, groups);
    }
  }

  // kLanes states, transposed: one raw register per raw unit of the head, one lane per
  // state.
  __attribute__((always_inline)) void transposed_keys(int strip, int raw,
                                                      U (&r)[kLanes]) const {
    const uint8_t* const* const cells = cells_here_ + strip * kLanes;
    const int elem = raw * kElems * kExpand;
    const int left = head_size_ - elem;
    if (left >= kKeyElems) {  // the usual case, without masks
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) r[i] = cells_.load_key(cells[i], elem, kKeyElems);
    } else {
      for (int i = 0; i < kLanes; ++i) r[i] = cells_.load_key(cells[i], elem, left);
    }
    transpose(r);
  }

  // kGroupStates states, interleaved: one unit per element of the head, from `elem` on.
  __attribute__((always_inline)) void interleaved_values(const Tables& tables, int group,
                                                         int elem,
                                                         U (&r)[kDots][kRegs]) const {
    const int slot = group * kGroupStates;
    const int left = head_size_v_ - elem;
    const int count = left >= kValueElems ? kValueElems : left;
    if constexpr (Cells::kPlaced && !Cells::kDecoded) {
      cells_.load_values(tables, pages_here_ + slot, places_here_ + slot, elem, count, r);
    } else if (left >= kValueElems) {
      cells_.load_values(tables, cells_here_ + slot, elem, kValueElems, r);
    } else {
      cells_.load_values(tables, cells_here_ + slot, elem, left, r);
    }
  }

  // Lines of the tile ahead to ask for while some bytes of this one are multiplied: as
  // many as these came from, at least one.
  static constexpr int lines_of(int bytes) {
    return bytes > kCacheLine ? bytes / kCacheLine : 1;
  }

  static constexpr int kKeyLines = lines_of(kLanes * Cells::kRegisterBytes);
  static constexpr int kValueBytes = Cells::kValueGroupBytes;
  static constexpr int kValueLines = lines_of(kValueBytes);
  static constexpr int kGroupsPerLine = (kValueLines * kCacheLine) / kValueBytes;

  __attribute__((always_inline)) const uint8_t* value_lines_ahead(int group) {
    if (group % kGroupsPerLine == 0) return ahead_.take(kValueLines);
    return reinterpret_cast<const uint8_t*>(scores_);
  }

  template <int kLines>
  VLLM_INLINE void ask_for(const uint8_t* lines) {
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) prefetch_line(lines + i * kCacheLine);
  }

  // Line i of kLanes registers, of which a line may hold several.
  VLLM_INLINE void ask_for_line_of(const uint8_t* lines, int i) {
    constexpr int kPerLine = kLanes / kKeyLines;
    if (i % kPerLine == 0) prefetch_line(lines + i / kPerLine * kCacheLine);
  }

  float* strip_scales(int strip) const {
    return group_scales_ + strip * (group_scale_floats(a_) / (kTileStates / kLanes));
  }

  void load_group_scales(int strip) {
    if constexpr (Cells::kKeyGroup > 0) {
      const int slot = strip * kLanes;
      cells_.load_group_scales(pages_here_ + slot, places_here_ + slot,
                               strip_scales(strip));
    }
  }

  // The inner loops stand alone: merged, they get too few registers.
  __attribute__((noinline)) void unpack_keys(int strip) {
    uint32_t* const to = keys_ + strip * key_row_ * kLanes;
    const Tables tables = cells_.tables();
    load_group_scales(strip);
    F square = set1(0.f);
    for (int raw = 0; raw < key_raws_; raw += kLanes) {
      U r[kLanes];
      transposed_keys(strip, raw, r);
      const uint8_t* const ahead = ahead_.take(kKeyLines);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (raw + i >= key_raws_) break;
        ask_for_line_of(ahead, i);
        U units[kExpand];
        cells_.expand_key(tables, r[i], units);
#pragma GCC unroll 4
        for (int j = 0; j < kExpand; ++j) {
          u_store(to + ((raw + i) * kExpand + j) * kLanes, units[j]);
          if constexpr (Cells::kKeySquares) {
            square = Units::dot(square, units[j], units[j]);
          }
        }
      }
    }
    if constexpr (Cells::kKeySquares) {
      store(numbers_.key_square + strip * kLanes, square);
    }
  }

  __attribute__((noinline)) void unpack_values(int group) {
    const Tables tables = cells_.tables();
    uint32_t* const to = values_ + group * kDots * acc_row_;
    for (int elem = 0; elem < head_size_v_; elem += kValueElems) {
      U r[kDots][kRegs];
      interleaved_values(tables, group, elem, r);
      for (int d = 0; d < kDots; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i) {
          u_store(to + d * acc_row_ + elem + i * kLanes, r[d][i]);
        }
      }
      ask_for<kValueLines>(value_lines_ahead(group));
    }
  }

  template <int kRows>
  __attribute__((noinline)) void score_strip(int strip) {
    const uint32_t* const queries = queries_;
    const int64_t query_row = query_row_;
    const int64_t query_part = key_row_;
    const int raws = key_raws_;
    const Tables tables = cells_.tables();
    load_group_scales(strip);
    const float* scales = Cells::kKeyGroup > 0 ? strip_scales(strip) : nullptr;
    F square = set1(0.f);
    Sum acc[kRows];
    Sum part[kRows];
    ProductArgs starts{};
    starts.a = queries;
    starts.a_row = query_row;
    starts.starts = kParts * key_row_;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      acc[row] = part[row] = start_of<KeyUnits>(starts, nullptr, row);
    }
    for (int raw = 0; raw < raws; raw += kLanes) {
      U r[kLanes];
      transposed_keys(strip, raw, r);
      const uint8_t* const ahead = ahead_.take(kKeyLines);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (kExpand > 1 && raw + i >= raws) break;
        ask_for_line_of(ahead, i);
        U units[kExpand];
        cells_.expand_key(tables, r[i], units);
#pragma GCC unroll 4
        for (int j = 0; j < kExpand; ++j) {
          if constexpr (Cells::kKeySquares) {
            square = Units::dot(square, units[j], units[j]);
          }
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) {
            const uint32_t* const query =
                queries + row * query_row + (raw + i) * kExpand + j;
            Sum& sum = Cells::kKeyGroup > 0 ? part[row] : acc[row];
            Units::add_one(sum, units[j], query, query_part);
          }
        }
        if constexpr (Cells::kKeyGroup > 0) {
          if ((i + 1) % Cells::kKeyGroup != 0) continue;
          const F scale = load(scales);
          scales += kLanes;
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) {
            acc[row] = fma(part[row], scale, acc[row]);
            part[row] = set1(0.f);
          }
        }
      }
    }
    if constexpr (Cells::kKeySquares) {
      store(numbers_.key_square + strip * kLanes, square);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      store(scores_ + row * kTileStates + strip * kLanes,
            end_of<KeyUnits>(starts, acc[row], nullptr, row));
    }
  }

  template <int kRows>
  __attribute__((noinline)) void sum_values(int elem, int groups) {
    const uint32_t* const probabilities = probabilities_;
    const Tables tables = cells_.tables();
    Sum acc[kRows][kRegs];
    ProductArgs sums{};
    sums.rescale = rescale_;
    sums.factors = factors_;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int i = 0; i < kRegs; ++i) {
        const float* const c = running_.acc + row * acc_row_ + elem + i * kLanes;
        acc[row][i] = start_of<ValueUnits>(sums, c, row);
      }
    }
    for (int group = 0; group < groups; ++group) {
      U r[kDots][kRegs];
      interleaved_values(tables, group, elem, r);
      ask_for<kValueLines>(value_lines_ahead(group));
#pragma GCC unroll 2
      for (int d = 0; d < kDots; ++d) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const typename Units::Factor p = Units::factor(
              probabilities + row * kParts * kRowUnits + group * kDots + d, kRowUnits);
#pragma GCC unroll 4
          for (int i = 0; i < kRegs; ++i) {
            ValueUnits::add(acc[row][i], r[d][i], p);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int i = 0; i < kRegs; ++i) {
        float* const c = running_.acc + row * acc_row_ + elem + i * kLanes;
        store(c, end_of<ValueUnits>(sums, acc[row][i], c, row));
      }
    }
  }

  __attribute__((noinline)) void softmax(int64_t tile, int vectors) {
    if constexpr (Cells::kKeyScales || Cells::kValueScales) {
      cells_.load_numbers(cells_here_, vectors * kLanes, numbers_);
    }
    for (int row = 0; row < rows_; ++row) weight_[row] = mask_scores(tile, row, vectors);
    for (int row = 0; row < rows_; row += kLanes) {
      const F before = load(running_.max + row);
      const F now = max(before, load(weight_ + row));
      store(rescale_ + row, exp(sub(before, now)));
      store(running_.max + row, now);
    }
    for (int row = 0; row < rows_; ++row) {
      const float sum = exponentiate(row, vectors);
      running_.sum[row] = running_.sum[row] * rescale_[row] + sum;
      if constexpr (Cells::kValueBiases) add_value_biases(row, vectors);
    }
  }

  // Of a query in whole numbers.
  float query_scale(int row) const {
    if constexpr (kParts == 1) return 1.f;
    return reinterpret_cast<const float*>(queries_ + (row + 1) * query_row_ - kLanes)[2];
  }

  // Scales, caps and masks a row's scores; returns their maximum.
  float mask_scores(int64_t tile, int row, int vectors) {
    const int64_t lo = row_begin_[row] - tile;
    const int64_t hi = row_end_[row] - tile;
    const bool partial = lo > 0 || hi < vectors * kLanes;
    const bool capped = a_.soft_cap > 0.f;
    const F scale = set1((capped ? a_.scale / a_.soft_cap : a_.scale) * query_scale(row));
    F largest = set1(kLowestMax);
    for (int v = 0; v < vectors; ++v) {
      float* const p = scores_ + row * kTileStates + v * kLanes;
      F x = load(p);
      if constexpr (Cells::kKeyBiases) {
        x = fma(load(numbers_.key_bias + v * kLanes), set1(query_sums_[row]), x);
      }
      x = mul(x, scale);
      if constexpr (Cells::kKeyScales) x = mul(x, load(numbers_.key_scale + v * kLanes));
      if (capped) x = mul(tanh(x), set1(a_.soft_cap));
      if (partial) {
        x = keep_range(x, static_cast<int>(larger(lo - v * kLanes, 0)),
                       static_cast<int>(larger(hi - v * kLanes, 0)));
      }
      store(p, x);
      largest = max(largest, x);
    }
    return reduce_max(largest);
  }

  // Leaves e^(score - max) as the row's probabilities, and as its scores where biases
  // follow; returns their sum.
  float exponentiate(int row, int vectors) {
    const F top = set1(running_.max[row]);
    F sum = set1(0.f);
    for (int v = 0; v < vectors; ++v) {
      F p = exp(sub(load(scores_ + row * kTileStates + v * kLanes), top));
      sum = add(sum, p);
      if constexpr (Cells::kValueBiases) {
        store(scores_ + row * kTileStates + v * kLanes, p);
      }
      if constexpr (Cells::kValueScales) {
        p = mul(p, load(numbers_.value_scale + v * kLanes));
      }
      if constexpr (kParts == 1) {
        cells_.store_probabilities(
            probabilities_ + row * kRowUnits + v * kLanes / kElems, p);
      } else {
        store(scores_ + row * kTileStates + v * kLanes, p);
      }
    }
    if constexpr (kParts > 1) {
      factors_[row] = cells_.store_whole_probabilities(
          probabilities_ + row * kParts * kRowUnits, scores_ + row * kTileStates, vectors);
    }
    return reduce_add(sum);
  }

  float& value_bias(const SoftmaxState& state, int row) const {
    return state.acc[(row + 1) * acc_row_ - kLanes];
  }

  void add_value_biases(int row, int vectors) {
    F sum = set1(0.f);
    for (int v = 0; v < vectors; ++v) {
      sum = fma(load(scores_ + row * kTileStates + v * kLanes),
                load(numbers_.value_bias + v * kLanes), sum);
    }
    float& bias = value_bias(running_, row);
    bias = bias * rescale_[row] + reduce_add(sum);
  }

  // Rows that attend to nothing become 0.
  void write_rows() {
    if (a_.sinks != nullptr) {
      for (int row = 0; row < rows_; ++row) weight_[row] = a_.sinks[head_of(row)];
      total_.add_logits(weight_, rescale_);
    }
    for (int row = 0; row < rows_; ++row) {
      const float sum = total_.sum[row];
      const F factor = set1(sum == 0.f ? 0.f : a_.v_scale / sum);
      const float* from = total_.acc + row * acc_row_;
      if constexpr (Cells::kFinishes) {
        const float bias = Cells::kValueBiases ? value_bias(total_, row) : 0.f;
        cells_.finish(from, bias, finished_);
        from = finished_;
      }
      const int64_t to = token_of(row) * a_.out.token_stride +
                         head_of(row) * a_.out.head_stride;
      switch (a_.out.dtype) {
        case kFloat32: write_row<kFloat32>(to, from, factor); break;
        case kFloat16: write_row<kFloat16>(to, from, factor); break;
        default: write_row<kBFloat16>(to, from, factor); break;
      }
    }
  }

  template <int kDType>
  void write_row(int64_t to, const float* from, F factor) const {
    uint8_t* const out = static_cast<uint8_t*>(a_.out.data) + to * dtype_bytes(kDType);
    for (int d = 0; d < head_size_v_; d += kLanes) {
      store_from_float<kDType>(out + d * dtype_bytes(kDType), mul(load(from + d), factor),
                               head_size_v_ - d);
    }
  }

  const AttentionArgs& a_;
  const WorkItem& w_;
  const Cells cells_;
  const int rows_;
  const int group_;          // query heads per KV head
  const int head_size_;
  const int head_size_v_;
  const int key_raws_;       // raw units of a key
  const int64_t key_row_;    // units of a key, rounded up to whole registers
  const int64_t query_row_;  // units of a query with all its parts
  const int64_t acc_row_;
  uint32_t* queries_;        // [rows, query_row]
  uint32_t* keys_;           // [strips, key_row, kLanes]
  uint32_t* values_;         // [kTileStates / kElems, acc_row]
  uint32_t* probabilities_;  // [rows, parts, kTileStates / kElems]
  uint8_t* decoded_;         // [kTileStates, row_bytes]
  float* scores_;            // [rows, kTileStates]
  float* rescale_;
  float* weight_;
  float* query_sums_;
  float* factors_;           // [rows]: of probabilities in whole numbers
  float* group_scales_;      // [strips, groups, kLanes]
  float* finished_;
  SoftmaxState total_;
  SoftmaxState running_;
  const int64_t first_;      // keys that any row sees
  const int64_t last_;
  Prefetcher ahead_;
  int32_t row_begin_[kMaxRows];
  int32_t row_end_[kMaxRows];
  const uint8_t* cells_here_[kTileStates];
  const uint8_t* pages_here_[Cells::kPlaced ? kTileStates : 1];
  int32_t places_here_[Cells::kPlaced ? kTileStates : 1];  // head * block_size + state
  StateNumbers numbers_;
};

#if defined(__AVX512BF16__)
// The kernel over some cells, where the instruction set has bf16 products.
template <class Cells>
struct PairKernel {
  static constexpr AttentionKernel kKernel = TileAttention<Cells>::kernel();
};
#define VLLM_PAIRS(...) &PairKernel<__VA_ARGS__>::kKernel
#else
#define VLLM_PAIRS(...) nullptr
#endif

}  // namespace vllm_cpu::VLLM_ISA
