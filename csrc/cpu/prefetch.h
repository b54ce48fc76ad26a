// Brings cells to the second-level cache line by line, in address order, well before
// they are read. Hardware follows a run of cells inside a page but not the block table,
// and takes few requests at a time: the lines are asked for one by one between
// multiplications.
#pragma once

#include "simd.h"
#include "work.h"

namespace vllm_cpu::VLLM_ISA {

constexpr int kCacheLine = 64;

constexpr int64_t kBytesAhead = 32 << 10;

class Prefetcher {
 public:
  // `near`: memory of this thread, as many lines as are ever taken at once.
  Prefetcher(const AttentionArgs& a, const WorkItem& item, const WorkItem* next,
             int cell_bytes, const void* near)
      : a_(a),
        item_(item),
        next_(next),
        cell_bytes_(cell_bytes),
        states_ahead_(round_up(kBytesAhead / cell_bytes, kTileStates)),
        near_(static_cast<const uint8_t*>(near)),
        line_(near_),
        run_end_(near_) {}

  // Starts on the tile that lies far enough ahead of the one read now: of this item, or
  // of the next where this one ends.
  void start_tile(int64_t tile) {
    state_ = tile + states_ahead_;
    const int64_t end = round_up(last_key(item_), kTileStates);
    if (state_ < end) {
      follow(item_);
    } else if (next_ != nullptr) {
      state_ += first_key(*next_) / kTileStates * kTileStates - end;
      follow(*next_);
    } else {
      rest();
    }
  }

  // The first of the next `count` lines where they lie in one run: the caller asks for
  // them. Elsewhere asks for them here, and gives the caller lines that are near anyway.
  __attribute__((always_inline)) const uint8_t* take(int count) {
    const uint8_t* const first = line_;
    const uint8_t* const after = first + count * step_;
    if (after <= run_end_) {
      line_ = after;
      return first;
    }
    take_one_by_one(count);
    return near_;
  }

 private:
  static int64_t first_key(const WorkItem& w) {
    return larger(w.keys.begin, static_cast<int64_t>(w.chunk_begin) * kChunkStates);
  }
  static int64_t last_key(const WorkItem& w) {
    return smaller(w.keys.end, static_cast<int64_t>(w.chunk_end) * kChunkStates);
  }

  void follow(const WorkItem& w) {
    table_ = a_.block_table + w.request * a_.block_table_stride;
    head_ = a_.pages.data + w.kv_head * a_.pages.head_stride;
    state_ = larger(state_, w.keys.begin);  // pages before may be gone
    end_ = last_key(w);
    if (state_ < end_) {
      start_run();
    } else {
      rest();
    }
  }

  // Nothing lies ahead: takes repeat a near line.
  void rest() {
    end_ = state_;
    line_ = run_end_ = near_;
    step_ = 0;
  }

  // A run is the rest of a page where cells touch, else one cell.
  void start_run() {
    const Pages& pages = a_.pages;
    const int64_t in_block = state_ % pages.block_size;
    line_ = head_ + table_[state_ / pages.block_size] * pages.block_stride +
            in_block * pages.state_stride;
    const int64_t run = pages.state_stride == cell_bytes_
                            ? smaller(pages.block_size - in_block, end_ - state_)
                            : 1;
    run_end_ = line_ + run * cell_bytes_;
    state_ += run;
    step_ = kCacheLine;
  }

  __attribute__((noinline)) void take_one_by_one(int count) {
    for (int i = 0; i < count; ++i) {
      if (line_ >= run_end_) {
        if (state_ >= end_) return;
        start_run();
      }
      prefetch_line(line_);
      line_ += kCacheLine;
    }
  }

  const AttentionArgs& a_;
  const WorkItem& item_;
  const WorkItem* const next_;
  const int64_t cell_bytes_;
  const int64_t states_ahead_;
  const uint8_t* const near_;
  const uint8_t* line_;
  const uint8_t* run_end_;
  int64_t step_ = 0;           // 0 at rest
  int64_t state_ = 0;  // after the run
  int64_t end_ = 0;
  const int32_t* table_ = nullptr;
  const uint8_t* head_ = nullptr;
};

}  // namespace vllm_cpu::VLLM_ISA
