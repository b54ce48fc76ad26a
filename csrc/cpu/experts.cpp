// Mixtures of experts: tokens are grouped by expert, every panel of weights is read once.
//
// The first pass works on (expert, panel of w13): products, activation. The second works
// on panels of w2: each walks the experts in ascending order and adds their weighted
// outputs, so that no output of a single expert is ever stored. Sums are fp32, each of
// them over steps in order: a token's bits depend neither on the rest of the batch nor
// on threads.
#include "experts.h"

#include <omp.h>

#include "kernels.h"

namespace vllm_cpu::VLLM_ISA {

namespace {

constexpr int kVectors = kPanel / kLanes;
constexpr int kPairs = kPanel / 2;
constexpr int kChunkTokens = 512;      // scratch is for so many
constexpr int64_t kSerialMacs = 1 << 16;
constexpr int kUnitsAhead = 1024;      // 4 KiB: 2 and 8 KiB measured slower

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

// How units of weights are multiplied, and what a row of activations holds for a step.
struct FloatSteps {
  static constexpr int kDType = kFloat32;
  static constexpr int kElems = 1;     // weights per unit
  static constexpr int kWords = 1;     // 32-bit words of a row per step
  static constexpr int kRowDType = kFloat32;
  static constexpr int kMaxRows = kLanes == 16 ? 8 : kLanes == 8 ? 3 : 1;
  struct Column {
    F x;
  };
  VLLM_INLINE Column column(const uint32_t* p) { return {as_float(u_load(p))}; }
  VLLM_INLINE F dot(F acc, const Column& c, const uint32_t* a) {
    return fma(c.x, as_float(u_set1(*a)), acc);
  }
};

#if defined(__AVX512BF16__)
struct BFloat16Steps {
  static constexpr int kDType = kBFloat16;
  static constexpr int kElems = 2;
  static constexpr int kWords = 1;
  static constexpr int kRowDType = kBFloat16;
  static constexpr int kMaxRows = 8;
  struct Column {
    U x;
  };
  VLLM_INLINE Column column(const uint32_t* p) { return {u_load(p)}; }
  VLLM_INLINE F dot(F acc, const Column& c, const uint32_t* a) {
    return _mm512_dpbf16_ps(acc, (__m512bh)c.x, (__m512bh)u_set1(*a));
  }
};
#else
// Rows stay fp32: weights are widened in registers.
struct BFloat16Steps {
  static constexpr int kDType = kBFloat16;
  static constexpr int kElems = 2;
  static constexpr int kWords = 2;
  static constexpr int kRowDType = kFloat32;
  static constexpr int kMaxRows = kLanes == 8 ? 2 : 1;
  struct Column {
    F low, high;
  };
  VLLM_INLINE Column column(const uint32_t* p) {
    const Words bits = (Words)u_load(p);
    return {(F)(bits << 16), (F)(bits & 0xffff0000u)};
  }
  VLLM_INLINE F dot(F acc, const Column& c, const uint32_t* a) {
    acc = fma(c.low, as_float(u_set1(a[0])), acc);
    return fma(c.high, as_float(u_set1(a[1])), acc);
  }
};
#endif

// c [kRows, kPanel] = bias + rows a times one panel b.
template <class Steps, int kRows>
void panel_block(float* c, const float* bias, const uint32_t* a, int64_t a_row,
                 const uint32_t* b, int64_t steps) {
  F acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = bias == nullptr ? set1(0.f) : load(bias + v * kLanes);
    }
  }
  for (int64_t step = 0; step < steps; ++step, a += Steps::kWords, b += kPanel) {
    prefetch_line(b + kUnitsAhead);
    prefetch_line(b + kUnitsAhead + 16);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const typename Steps::Column column = Steps::column(b + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        acc[r][v] = Steps::dot(acc[r][v], column, a + r * a_row);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(c + r * kPanel + v * kLanes, acc[r][v]);
  }
}

template <class Steps, int kRows = Steps::kMaxRows>
void panel_rows(int rows, float* c, const float* bias, const uint32_t* a, int64_t a_row,
                const uint32_t* b, int64_t steps) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return panel_block<Steps, kRows>(c, bias, a, a_row, b, steps);
    panel_rows<Steps, kRows - 1>(rows, c, bias, a, a_row, b, steps);
  }
}

VLLM_INLINE F sigmoid(F x) {
  const F clipped = min(max(set1(-87.f), x), set1(87.f));
  return div(set1(1.f), add(set1(1.f), exp(sub(set1(0.f), clipped))));
}

VLLM_INLINE F activate(const ExpertsArgs& a, F gate, F up) {
  if (a.activation == kSiluGate) return mul(mul(gate, sigmoid(gate)), up);
  gate = min(set1(a.limit), gate);
  up = max(set1(-a.limit), min(set1(a.limit), up));
  return mul(mul(gate, sigmoid(mul(gate, set1(a.alpha)))), add(up, set1(1.f)));
}

// Sizes of one call, and where its chunk of tokens lies in scratch.
template <class Steps>
struct Layout {
  int64_t hidden_steps, inner_steps, inner_panels, out_panels;
  int64_t x_row, act_row;              // words
  int32_t* group;                      // [experts + 1]: first row of each expert
  int32_t* hit;                        // [experts]: those with rows, ascending
  int32_t num_hit = 0;
  int32_t* next;                       // [experts]
  int32_t* row_token;                  // [rows]
  float* row_weight;                   // [rows]
  uint32_t* x;                         // [rows, x_row]
  uint32_t* act;                       // [rows, act_row]
  float* sums;                         // [threads, tokens, kPanel]
  int64_t bytes;

  Layout(const ExpertsArgs& a, int threads, void* scratch) {
    const int64_t tokens = smaller(a.num_tokens, kChunkTokens);
    const int64_t rows = tokens * a.top_k;
    hidden_steps = (a.hidden + Steps::kElems - 1) / Steps::kElems;
    inner_steps = (a.intermediate + Steps::kElems - 1) / Steps::kElems;
    inner_panels = (a.intermediate + kPairs - 1) / kPairs;
    out_panels = (a.hidden + kPanel - 1) / kPanel;
    x_row = round_up(hidden_steps * Steps::kWords, 16);
    // A panel writes all of its lanes.
    act_row = round_up(inner_panels * kPairs / Steps::kElems * Steps::kWords, 16);
    uint8_t* at = static_cast<uint8_t*>(scratch);
    bytes = 0;
    const auto take = [&](auto*& field, int64_t count) {
      field = reinterpret_cast<decltype(field + 0)>(at + bytes);
      bytes += round_up(count * 4, 64);
    };
    take(group, a.num_experts + 1);
    take(hit, a.num_experts);
    take(next, a.num_experts);
    take(row_token, rows);
    take(row_weight, rows);
    take(x, rows * x_row);
    take(act, rows * act_row);
    take(sums, threads * tokens * kPanel);
  }
};

// Rows of tokens [begin, end), grouped by expert; within one in the tokens' order.
template <class Steps>
void group_rows(const ExpertsArgs& a, int32_t begin, int32_t end, Layout<Steps>& to) {
  for (int32_t e = 0; e <= a.num_experts; ++e) to.group[e] = 0;
  const int64_t first = static_cast<int64_t>(begin) * a.top_k;
  const int64_t last = static_cast<int64_t>(end) * a.top_k;
  for (int64_t i = first; i < last; ++i) ++to.group[a.ids[i] + 1];
  for (int32_t e = 0; e < a.num_experts; ++e) {
    if (to.group[e + 1] > 0) to.hit[to.num_hit++] = e;
    to.next[e] = to.group[e];
    to.group[e + 1] += to.group[e];
  }
  for (int64_t i = first; i < last; ++i) {
    const int32_t row = to.next[a.ids[i]]++;
    to.row_token[row] = static_cast<int32_t>(i / a.top_k);
    to.row_weight[row] = a.weights[i];
  }
}

// One token's input as words of a row, 0 past its end.
template <class Steps>
void load_row(const ExpertsArgs& a, int32_t token, const Layout<Steps>& to, int64_t row) {
  constexpr int kBytes = dtype_bytes(Steps::kDType);
  const uint8_t* const from =
      static_cast<const uint8_t*>(a.x) + token * a.x_stride * kBytes;
  uint8_t* const words = reinterpret_cast<uint8_t*>(to.x + row * to.x_row);
  constexpr int kRowBytes = dtype_bytes(Steps::kRowDType);
  for (int64_t i = 0; i < to.x_row * 4 / kRowBytes; i += kLanes) {
    const auto left = static_cast<int>(larger(0, smaller(kLanes, a.hidden - i)));
    const F x = left == 0 ? set1(0.f) : load_as_float<Steps::kDType>(from + i * kBytes, left);
    store_from_float<Steps::kRowDType>(words + i * kRowBytes, x);
  }
}

// Activations of one expert's rows at the outputs of one panel of w13.
template <class Steps>
void up_panel(const ExpertsArgs& a, const Layout<Steps>& in, int64_t expert,
              int64_t panel) {
  const int64_t which = expert * in.inner_panels + panel;
  const uint32_t* const b = a.w13 + which * in.hidden_steps * kPanel;
  const float* const bias = a.bias13 == nullptr ? nullptr : a.bias13 + which * kPanel;
  const int32_t begin = in.group[expert];
  const int32_t rows = in.group[expert + 1] - begin;
  const int32_t blocks = (rows + Steps::kMaxRows - 1) / Steps::kMaxRows;
  constexpr int kRowBytes = dtype_bytes(Steps::kRowDType);
  alignas(64) float c[Steps::kMaxRows * kPanel];
  for (int32_t block = 0; block < blocks; ++block) {
    const int32_t from = begin + static_cast<int64_t>(rows) * block / blocks;
    const int32_t to = begin + static_cast<int64_t>(rows) * (block + 1) / blocks;
    panel_rows<Steps>(to - from, c, bias, in.x + from * in.x_row, in.x_row, b,
                      in.hidden_steps);
    for (int32_t row = from; row < to; ++row) {
      const float* const gate = c + (row - from) * kPanel;
      uint8_t* const act = reinterpret_cast<uint8_t*>(in.act + row * in.act_row) +
                           panel * kPairs * kRowBytes;
      for (int i = 0; i < kPairs; i += kLanes) {
        const F value = activate(a, load(gate + i), load(gate + kPairs + i));
        store_from_float<Steps::kRowDType>(act + i * kRowBytes, value);
      }
    }
  }
}

// The outputs of one panel of w2, of every token.
template <class Steps>
void down_panel(const ExpertsArgs& a, const Layout<Steps>& in, int64_t panel,
                int32_t first_token, int32_t tokens, float* sums) {
  alignas(64) float c[Steps::kMaxRows * kPanel];
  for (int64_t i = 0; i < tokens * kPanel; i += kLanes) store(sums + i, set1(0.f));
  for (int32_t i = 0; i < in.num_hit; ++i) {
    const int64_t expert = in.hit[i];
    const int64_t which = expert * in.out_panels + panel;
    const uint32_t* const b = a.w2 + which * in.inner_steps * kPanel;
    const float* const bias = a.bias2 == nullptr ? nullptr : a.bias2 + which * kPanel;
    const int32_t begin = in.group[expert];
    const int32_t rows = in.group[expert + 1] - begin;
    const int32_t blocks = (rows + Steps::kMaxRows - 1) / Steps::kMaxRows;
    for (int32_t block = 0; block < blocks; ++block) {
      const int32_t from = begin + static_cast<int64_t>(rows) * block / blocks;
      const int32_t to = begin + static_cast<int64_t>(rows) * (block + 1) / blocks;
      panel_rows<Steps>(to - from, c, bias, in.act + from * in.act_row, in.act_row, b,
                        in.inner_steps);
      for (int32_t row = from; row < to; ++row) {
        float* const sum = sums + (in.row_token[row] - first_token) * kPanel;
        const float* const part = c + (row - from) * kPanel;
        const F weight = set1(in.row_weight[row]);
        for (int i = 0; i < kPanel; i += kLanes) {
          store(sum + i, fma(weight, load(part + i), load(sum + i)));
        }
      }
    }
  }
  constexpr int kBytes = dtype_bytes(Steps::kDType);
  for (int32_t token = 0; token < tokens; ++token) {
    uint8_t* const out = static_cast<uint8_t*>(a.out) +
                         ((first_token + token) * a.out_stride + panel * kPanel) * kBytes;
    const int64_t width = smaller(kPanel, a.hidden - panel * kPanel);
    for (int64_t i = 0; i < width; i += kLanes) {
      store_from_float<Steps::kDType>(out + i * kBytes, load(sums + token * kPanel + i),
                                      static_cast<int>(smaller(kLanes, width - i)));
    }
  }
}

template <class Steps>
void run_chunk(const ExpertsArgs& a, int32_t begin, int32_t end, int threads,
               void* scratch) {
  Layout<Steps> layout(a, threads, scratch);
  group_rows<Steps>(a, begin, end, layout);
  const int32_t tokens = end - begin;
  const int64_t rows = static_cast<int64_t>(tokens) * a.top_k;
  const bool parallel =
      threads > 1 && rows * a.hidden * a.intermediate > kSerialMacs;
  const int64_t items = layout.num_hit * layout.inner_panels;
  const Layout<Steps>& in = layout;
#pragma omp parallel if (parallel)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      load_row<Steps>(a, in.row_token[row], in, row);
    }
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < items; ++i) {
      up_panel<Steps>(a, in, in.hit[i / in.inner_panels], i % in.inner_panels);
    }
    float* const sums = in.sums + omp_get_thread_num() * tokens * kPanel;
#pragma omp for schedule(dynamic, 1)
    for (int64_t panel = 0; panel < in.out_panels; ++panel) {
      down_panel<Steps>(a, in, panel, begin, tokens, sums);
    }
  }
}

template <class Steps>
void run_all(const ExpertsArgs& a, int threads, void* scratch) {
  for (int32_t begin = 0; begin < a.num_tokens; begin += kChunkTokens) {
    const auto end = static_cast<int32_t>(
        smaller(a.num_tokens, static_cast<int64_t>(begin) + kChunkTokens));
    run_chunk<Steps>(a, begin, end, threads, scratch);
  }
}

template <class Steps>
int64_t bytes_of(const ExpertsArgs& a, int threads) {
  return Layout<Steps>(a, threads, nullptr).bytes;
}

template <class Steps>
constexpr ExpertsKernel kKernel = {bytes_of<Steps>, run_all<Steps>};

}  // namespace

const ExpertsKernel* experts(int32_t dtype) {
  if (dtype == kFloat32) return &kKernel<FloatSteps>;
  if (dtype == kBFloat16) return &kKernel<BFloat16Steps>;
  return nullptr;
}

}  // namespace vllm_cpu::VLLM_ISA
