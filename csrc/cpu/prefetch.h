// Brings cells to the second-level cache line by line, in address order, well before
// they are read. Hardware follows a run of cells inside a page but not the block table,
// and takes few requests at a time: the lines are asked for one by one, a quarter of
// them during the softmax and the others between multiplications.
#pragma once

#include "cells.h"

namespace vllm_cpu::VLLM_ISA {

constexpr int kCacheLine = 64;

constexpr int64_t kBytesAhead = 32 << 10;

class Prefetcher {
 public:
  // `near`: memory of this thread, as many lines as are ever taken at once.
  template <class Cells>
  Prefetcher(const AttentionArgs& a, const WorkItem& item, const WorkItem* next,
             const Cells& cells, const void* near)
      : a_(a),
        item_(item),
        next_(next),
        runs_(&cells.page_run(0)),
        num_runs_(cells.num_runs()),
        near_(static_cast<const uint8_t*>(near)),
        line_(near_),
        run_end_(near_) {
    int64_t state_bytes = 0;
    for (int i = 0; i < num_runs_; ++i) state_bytes += runs_[i].bytes;
    states_ahead_ = round_up(kBytesAhead / state_bytes, kTileStates);
    tile_lines_ = state_bytes * kTileStates / kCacheLine;
  }

  // Starts on the tile that lies far enough ahead of the one read now: of this item, or
  // of the next where this one ends.
  void start_tile(int64_t tile) {
    if (left_ > 0) take_one_by_one(static_cast<int>(left_));
    left_ = tile_lines_;
    state_ = tile + states_ahead_;
    run_ = 0;
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

  // The first of the tile's next `count` lines where they lie in one run: the caller asks
  // for them. Elsewhere asks for them here, and gives the caller lines that are near.
  __attribute__((always_inline)) const uint8_t* take(int count) {
    if (left_ <= 0) return near_;
    left_ -= count;
    const uint8_t* const first = line_;
    const uint8_t* const after = first + count * step_;
    if (after <= run_end_) {
      line_ = after;
      return first;
    }
    take_one_by_one(count);
    return near_;
  }

  int64_t tile_lines() const { return tile_lines_; }

 private:
  static int64_t first_key(const WorkItem& w) {
    return larger(w.keys.begin, static_cast<int64_t>(w.chunk_begin) * kChunkStates);
  }
  static int64_t last_key(const WorkItem& w) {
    return smaller(w.keys.end, static_cast<int64_t>(w.chunk_end) * kChunkStates);
  }

  void follow(const WorkItem& w) {
    table_ = a_.block_table + w.request * a_.block_table_stride;
    kv_head_ = w.kv_head;
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

  // The rest of one of the page's runs where states touch, else one state.
  void start_run() {
    const Pages& pages = a_.pages;
    const PageRun& run = runs_[run_];
    const int64_t in_block = state_ % pages.block_size;
    line_ = pages.data + table_[state_ / pages.block_size] * pages.block_stride +
            run.base + kv_head_ * run.head_stride + in_block * run.state_stride;
    const int64_t states = runs_->state_stride == runs_->bytes
                               ? smaller(pages.block_size - in_block, end_ - state_)
                               : 1;
    run_end_ = line_ + states * run.bytes;
    step_ = kCacheLine;
    if (++run_ < num_runs_) return;
    run_ = 0;
    state_ += states;
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
  const PageRun* const runs_;
  const int num_runs_;
  int64_t states_ahead_;
  int64_t tile_lines_;         // of all states of a tile
  int64_t left_ = 0;           // of them, not yet asked for
  const uint8_t* const near_;
  const uint8_t* line_;
  const uint8_t* run_end_;
  int64_t step_ = 0;           // 0 at rest
  int run_ = 0;
  int64_t state_ = 0;          // of the run to start next
  int64_t end_ = 0;
  const int32_t* table_ = nullptr;
  int64_t kv_head_ = 0;
};

}  // namespace vllm_cpu::VLLM_ISA
