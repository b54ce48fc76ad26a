// Attention of one tile of rows over paged keys and values, written once for every cell
// format: tiles of 64 states are unpacked to scratch, multiplied in registers, and
// folded into a running softmax (fp32). A format supplies `Cells`:
//
//   using Units;                          the multiply-accumulate lanes it unpacks to
//   explicit Cells(const AttentionArgs&);
//   U load_key(cell, elem, count)         kLanes units from element `elem`, 0 past count
//   U load_value(cell, elem, count)
//   int cell_bytes;
//   static constexpr int kRegisterBytes;  of the cell that fill one register of units
//   static constexpr bool kDecoded;       whether cells become rows first, which loads
//   decode(cell, row); int row_bytes;     then read instead
//   static constexpr bool kStateScales;   whether scores and probabilities are scaled:
//   float key_scale(cell), value_scale(cell);   per state
#pragma once

#include "prefetch.h"
#include "product.h"
#include "softmax_state.h"
#include "work.h"

namespace vllm_cpu::VLLM_ISA {

template <class Cells>
class TileAttention {
  using Units = typename Cells::Units;
  static constexpr int kElems = Units::kElems;

 public:
  static int64_t partial_floats(const AttentionArgs& a, int rows) {
    return SoftmaxState::floats(rows, acc_row_floats(a));
  }

  static int64_t scratch_bytes(const AttentionArgs& a) {
    const int64_t key_row = key_row_units(a);
    const int64_t floats = kMaxRows * (key_row + 2 * kTileStates) +
                           kTileStates * (key_row + acc_row_floats(a)) +
                           2 * partial_floats(a, kMaxRows) + 8 * kRowSlots +
                           2 * kTileStates + decoded_floats(a);
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
  static int64_t acc_row_floats(const AttentionArgs& a) {
    return round_up(a.out.size, 2 * kLanes);  // whole registers of any unit
  }
  static int64_t key_row_units(const AttentionArgs& a) {
    return round_up((a.query.size + kElems - 1) / kElems, kLanes);
  }
  static int64_t decoded_floats(const AttentionArgs& a) {
    return Cells::kDecoded ? kTileStates * round_up(a.query.size, 16) : 0;
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
        key_units_((a.query.size + kElems - 1) / kElems),
        key_row_(key_row_units(a)),
        acc_row_(acc_row_floats(a)),
        first_(w.keys.begin),
        last_(w.keys.end),
        ahead_(a, w, next, cells_.cell_bytes, scratch) {
    const auto carve = [&scratch](int64_t floats) {
      float* const p = scratch;
      scratch += round_up(floats, 16);
      return p;
    };
    const auto units = [&](int64_t n) { return reinterpret_cast<uint32_t*>(carve(n)); };
    queries_ = units(rows_ * key_row_);
    keys_ = units(kTileStates * key_row_);
    values_ = units(kTileStates / kElems * acc_row_);
    probabilities_ = units(rows_ * (kTileStates / kElems));
    scores_ = carve(rows_ * kTileStates);
    rescale_ = carve(kRowSlots);
    weight_ = carve(kRowSlots);
    key_scales_ = carve(kTileStates);
    value_scales_ = carve(kTileStates);
    decoded_ = reinterpret_cast<uint8_t*>(carve(decoded_floats(a)));
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
      Units::load_query(queries_ + row * key_row_, a_.query, from, key_row_);
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
  void locate(int64_t tile, const uint8_t** cells) const {
    const Pages& pages = a_.pages;
    const uint8_t* const head = pages.data + w_.kv_head * pages.head_stride;
    const int32_t* const table = a_.block_table + w_.request * a_.block_table_stride;
    const int64_t begin = larger(tile, first_);
    int64_t block = begin / pages.block_size;
    int64_t in_block = begin % pages.block_size;
    int slot = static_cast<int>(begin - tile);
    const int end = static_cast<int>(smaller(kTileStates, last_ - tile));
    const int leading = slot;
    while (slot < end) {
      const uint8_t* cell = head + table[block] * pages.block_stride +
                            in_block * pages.state_stride;
      const int stop = static_cast<int>(smaller(end, slot + pages.block_size - in_block));
      for (; slot < stop; ++slot, cell += pages.state_stride) cells[slot] = cell;
      in_block = 0;
      ++block;
    }
    for (int i = 0; i < leading; ++i) cells[i] = cells[leading];
    for (int i = end; i < kTileStates; ++i) cells[i] = cells[end - 1];
  }

  void run_tile(int64_t tile) {
    const int states = static_cast<int>(smaller(kTileStates, last_ - tile));
    const int vectors = (states + kLanes - 1) / kLanes;
    locate(tile, cells_here_);
    ahead_.start_tile(tile);
    if constexpr (Cells::kDecoded) decode_cells(vectors * kLanes);

    if (rows_ <= kFewRows) {
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
      if (cell != last) cells_.decode(cell, row += cells_.row_bytes);
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
    scores.a_row = key_row_;
    scores.b = keys_;
    scores.b_step = kLanes;
    scores.b_vector = key_row_ * kLanes;
    scores.steps = key_units_;
    product<Units>(scores, rows_, vectors);

    softmax(tile, vectors);

    const int groups = (states + kElems - 1) / kElems;
    for (int group = 0; group < groups; ++group) unpack_values(group);
    ProductArgs sums{};
    sums.c = running_.acc;
    sums.c_row = acc_row_;
    sums.a = probabilities_;
    sums.a_row = kTileStates / kElems;
    sums.b = values_;
    sums.b_step = acc_row_;
    sums.b_vector = kLanes;
    sums.steps = groups;
    sums.rescale = rescale_;
    product<Units>(sums, rows_, (head_size_v_ + kLanes - 1) / kLanes);
  }

  // Multiplies states as they are unpacked, in registers; sums in the same order as
  // many_rows, to the same bits.
  template <int kRows>
  void few_rows(int64_t tile, int states, int vectors) {
    if constexpr (kRows < kFewRows) {
      if (rows_ != kRows) return few_rows<kRows + 1>(tile, states, vectors);
    }
    for (int strip = 0; strip < vectors; ++strip) score_strip<kRows>(strip);
    softmax(tile, vectors);
    const int groups = (states + kElems - 1) / kElems;
    for (int elem = 0; elem < head_size_v_; elem += kElems * kLanes) {
      sum_values<kRows>(elem, groups);
    }
  }

  // kLanes states, transposed: one register per unit of the head, one lane per state.
  __attribute__((always_inline)) void transposed_keys(int strip, int unit,
                                                      U (&r)[kLanes]) const {
    constexpr int kWhole = kLanes * kElems;
    const uint8_t* const* const cells = cells_here_ + strip * kLanes;
    const int elem = unit * kElems;
    const int left = head_size_ - elem;
    if (left >= kWhole) {  // the usual case, without masks
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) r[i] = cells_.load_key(cells[i], elem, kWhole);
    } else {
      for (int i = 0; i < kLanes; ++i) r[i] = cells_.load_key(cells[i], elem, left);
    }
    transpose(r);
  }

  // kElems states, interleaved: one unit per element of the head, from `elem` on.
  __attribute__((always_inline)) void interleaved_values(int group, int elem,
                                                         U (&r)[kElems]) const {
    constexpr int kWhole = kLanes * kElems;
    const uint8_t* const* const cells = cells_here_ + group * kElems;
    const int left = head_size_v_ - elem;
    if (left >= kWhole) {
#pragma GCC unroll 4
      for (int i = 0; i < kElems; ++i) r[i] = cells_.load_value(cells[i], elem, kWhole);
    } else {
      for (int i = 0; i < kElems; ++i) r[i] = cells_.load_value(cells[i], elem, left);
    }
    Units::interleave(r);
  }

  // Lines of the tile ahead to ask for while `registers` of this one are multiplied: as
  // many as these came from, at least one.
  static constexpr int lines_of(int registers) {
    const int lines = registers * Cells::kRegisterBytes / kCacheLine;
    return lines > 0 ? lines : 1;
  }

  static constexpr int kValueLines = lines_of(kElems);
  static constexpr int kGroupsPerLine =
      kValueLines * kCacheLine / (kElems * Cells::kRegisterBytes);

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
    constexpr int kPerLine = kLanes / lines_of(kLanes);
    if (i % kPerLine == 0) prefetch_line(lines + i / kPerLine * kCacheLine);
  }

  void unpack_keys(int strip) {
    uint32_t* const to = keys_ + strip * key_row_ * kLanes;
    for (int unit = 0; unit < key_units_; unit += kLanes) {
      U r[kLanes];
      transposed_keys(strip, unit, r);
      const uint8_t* const ahead = ahead_.take(lines_of(kLanes));
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        u_store(to + (unit + i) * kLanes, r[i]);
        ask_for_line_of(ahead, i);
      }
    }
  }

  void unpack_values(int group) {
    uint32_t* const to = values_ + group * acc_row_;
    for (int elem = 0; elem < head_size_v_; elem += kElems * kLanes) {
      U r[kElems];
      interleaved_values(group, elem, r);
#pragma GCC unroll 4
      for (int i = 0; i < kElems; ++i) u_store(to + elem + i * kLanes, r[i]);
      ask_for<kValueLines>(value_lines_ahead(group));
    }
  }

  template <int kRows>
  void score_strip(int strip) {
    const uint32_t* const queries = queries_;
    const int64_t query_row = key_row_;
    F acc[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) acc[row] = set1(0.f);
    for (int unit = 0; unit < key_row_; unit += kLanes) {
      U r[kLanes];
      transposed_keys(strip, unit, r);
      const uint8_t* const ahead = ahead_.take(lines_of(kLanes));
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        ask_for_line_of(ahead, i);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const uint32_t* const query = queries + row * query_row + unit + i;
          acc[row] = Units::dot_one(acc[row], r[i], query);
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      store(scores_ + row * kTileStates + strip * kLanes, acc[row]);
    }
  }

  template <int kRows>
  void sum_values(int elem, int groups) {
    const uint32_t* const probabilities = probabilities_;
    F acc[kRows][kElems];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int i = 0; i < kElems; ++i) {
        acc[row][i] = mul(load(running_.acc + row * acc_row_ + elem + i * kLanes),
                          set1(rescale_[row]));
      }
    }
    for (int group = 0; group < groups; ++group) {
      U r[kElems];
      interleaved_values(group, elem, r);
      ask_for<kValueLines>(value_lines_ahead(group));
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const U p = u_set1(probabilities[row * (kTileStates / kElems) + group]);
#pragma GCC unroll 4
        for (int i = 0; i < kElems; ++i) acc[row][i] = Units::dot(acc[row][i], r[i], p);
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int i = 0; i < kElems; ++i) {
        store(running_.acc + row * acc_row_ + elem + i * kLanes, acc[row][i]);
      }
    }
  }

  void softmax(int64_t tile, int vectors) {
    if constexpr (Cells::kStateScales) {
      for (int i = 0; i < vectors * kLanes; ++i) {
        key_scales_[i] = cells_.key_scale(cells_here_[i]);
        value_scales_[i] = cells_.value_scale(cells_here_[i]);
      }
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
    }
  }

  // Scales, caps and masks a row's scores; returns their maximum.
  float mask_scores(int64_t tile, int row, int vectors) {
    const int64_t lo = row_begin_[row] - tile;
    const int64_t hi = row_end_[row] - tile;
    const bool partial = lo > 0 || hi < vectors * kLanes;
    const bool capped = a_.soft_cap > 0.f;
    const F scale = set1(capped ? a_.scale / a_.soft_cap : a_.scale);
    F largest = set1(kLowestMax);
    for (int v = 0; v < vectors; ++v) {
      float* const p = scores_ + row * kTileStates + v * kLanes;
      F x = mul(load(p), scale);
      if constexpr (Cells::kStateScales) x = mul(x, load(key_scales_ + v * kLanes));
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

  // Leaves e^(score - max) as the row's probabilities; returns their sum.
  float exponentiate(int row, int vectors) {
    const F top = set1(running_.max[row]);
    F sum = set1(0.f);
    for (int v = 0; v < vectors; ++v) {
      F p = exp(sub(load(scores_ + row * kTileStates + v * kLanes), top));
      sum = add(sum, p);
      if constexpr (Cells::kStateScales) p = mul(p, load(value_scales_ + v * kLanes));
      Units::store_probabilities(
          probabilities_ + (row * kTileStates + v * kLanes) / kElems, p);
    }
    return reduce_add(sum);
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
      const float* const from = total_.acc + row * acc_row_;
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
  const int key_units_;
  const int64_t key_row_;    // key_units_, rounded up to whole registers
  const int64_t acc_row_;
  uint32_t* queries_;        // [rows, key_row]
  uint32_t* keys_;           // [strips, key_row, kLanes]
  uint32_t* values_;         // [kTileStates / kElems, acc_row]
  uint32_t* probabilities_;  // [rows, kTileStates / kElems]
  uint8_t* decoded_;         // [kTileStates, row_bytes]
  float* scores_;            // [rows, kTileStates]
  float* rescale_;
  float* weight_;
  float* key_scales_;
  float* value_scales_;
  SoftmaxState total_;
  SoftmaxState running_;
  const int64_t first_;      // keys that any row sees
  const int64_t last_;
  Prefetcher ahead_;
  int32_t row_begin_[kMaxRows];
  int32_t row_end_[kMaxRows];
  const uint8_t* cells_here_[kTileStates];
};

}  // namespace vllm_cpu::VLLM_ISA
