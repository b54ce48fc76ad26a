// Attention of one tile of rows over paged keys and values, written once for every cell
// format: tiles of 64 states are multiplied as they are unpacked, or unpacked to scratch
// where many rows read them, and folded into a running softmax (fp32). cells.h says what
// a format supplies; its constants promise besides
//
//   kDecoded      decode(cell, row); int64_t row_bytes;     loads then read the row
//   kFinishes     finish(acc, bias, to)   sums in the order of elements
#pragma once

#include "tile_many_rows.h"
#include "tile_softmax.h"

namespace vllm_cpu::VLLM_ISA {

template <class Cells>
class TileAttention {
  using Frame = TileFrame<Cells>;
  using Units = typename Cells::Units;

 public:
  static void attend(const AttentionArgs& a, const WorkItem& w, const WorkItem* next,
                     void* scratch) {
    Frame t(a, w, next, static_cast<float*>(scratch));
    load_queries(t);
    if (w.partials != nullptr) {
      for (int chunk = w.chunk_begin; chunk < w.chunk_end; ++chunk) {
        t.running = partial(t, chunk);
        run_chunk(t, chunk);
      }
      return;
    }
    fold_chunks(t);
    write_rows(t);
  }

  static void merge(const AttentionArgs& a, const WorkItem& w, void* scratch) {
    Frame t(a, w, nullptr, static_cast<float*>(scratch));
    t.total.reset();
    for (int chunk = w.chunk_begin; chunk < w.chunk_end; ++chunk) {
      t.total.fold(partial(t, chunk), t.rescale, t.weight);
    }
    write_rows(t);
  }

  static constexpr AttentionKernel kernel() {
    return {Frame::scratch_bytes, Frame::partial_floats, attend, merge};
  }

 private:
  static SoftmaxState partial(const Frame& t, int chunk) {
    const int64_t floats = (chunk - t.w.chunk_begin) * Frame::partial_floats(t.a, t.rows);
    return SoftmaxState(t.w.partials + floats, t.rows, t.acc_row);
  }

  static void load_queries(Frame& t) {
    for (int row = 0; row < t.rows; ++row) {
      const int64_t from = t.token_of(row) * t.a.query.token_stride +
                           t.head_of(row) * t.a.query.head_stride;
      uint32_t* const to = t.queries + row * t.query_row;
      t.cells.load_query(to, t.a.query, from, t.key_row);
      if constexpr (Cells::kKeyBiases) {
        F sum = set1(0.f);
        for (int i = 0; i < t.key_row; i += kLanes) {
          sum = Units::dot(sum, u_load(to + i), Units::ones());
        }
        t.query_sums[row] = reduce_add(sum);
      }
    }
  }

  // The first chunk is what folding it into nothing gives, to the bit.
  static void fold_chunks(Frame& t) {
    if (t.w.chunk_begin == t.w.chunk_end) return t.total.reset();
    const SoftmaxState running = t.running;
    t.running = t.total;
    run_chunk(t, t.w.chunk_begin);
    t.running = running;
    for (int chunk = t.w.chunk_begin + 1; chunk < t.w.chunk_end; ++chunk) {
      run_chunk(t, chunk);
      t.total.fold(t.running, t.rescale, t.weight);
    }
  }

  static void run_chunk(Frame& t, int chunk) {
    t.running.reset();
    const int64_t chunk_begin = static_cast<int64_t>(chunk) * kChunkStates;
    const int64_t first = t.w.keys.begin / kTileStates * kTileStates;
    const int64_t end = smaller(chunk_begin + kChunkStates, t.w.keys.end);
    for (int64_t tile = larger(chunk_begin, first); tile < end; tile += kTileStates) {
      run_tile(t, tile);
    }
  }

  static void run_tile(Frame& t, int64_t tile) {
    const int states = static_cast<int>(smaller(kTileStates, t.w.keys.end - tile));
    const int vectors = (states + kLanes - 1) / kLanes;
    t.states.locate(tile);
    t.ahead.start_tile(tile);
    if (t.rows <= Cells::kFewRows) {
      FewRows<Frame>::score(t, vectors);
      TileSoftmax<Frame>::run(t, tile, vectors);
      FewRows<Frame>::sum(t, states);
    } else {
      ManyRows<Frame>::score(t, vectors);
      TileSoftmax<Frame>::run(t, tile, vectors);
      ManyRows<Frame>::sum(t, states);
    }
  }

  // Rows that attend to nothing become 0.
  static void write_rows(Frame& t) {
    if (t.a.sinks != nullptr) {
      for (int row = 0; row < t.rows; ++row) {
        t.weight[row] = t.a.sinks[t.head_of(row)] * kLog2E;
      }
      t.total.add_scores(t.weight, t.rescale);
    }
    for (int row = 0; row < t.rows; ++row) {
      const float sum = t.total.sum[row];
      const F factor = set1(sum == 0.f ? 0.f : t.a.v_scale / sum);
      const float* from = t.total.acc + row * t.acc_row;
      if constexpr (Cells::kFinishes) {
        t.cells.finish(from, t.total.bias[row], t.finished);
        from = t.finished;
      }
      const int64_t to = t.token_of(row) * t.a.out.token_stride +
                         t.head_of(row) * t.a.out.head_stride;
      switch (t.a.out.dtype) {
        case kFloat32: write_row<kFloat32>(t, to, from, factor); break;
        case kFloat16: write_row<kFloat16>(t, to, from, factor); break;
        default: write_row<kBFloat16>(t, to, from, factor); break;
      }
    }
  }

  template <int kDType>
  static void write_row(const Frame& t, int64_t to, const float* from, F factor) {
    uint8_t* const out = static_cast<uint8_t*>(t.a.out.data) + to * dtype_bytes(kDType);
    for (int d = 0; d < t.a.out.size; d += kLanes) {
      store_from_float<kDType>(out + d * dtype_bytes(kDType), mul(load(from + d), factor),
                               t.a.out.size - d);
    }
  }
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
