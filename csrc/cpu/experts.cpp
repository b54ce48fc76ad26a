// Mixtures of experts: tokens are grouped by expert, every panel of weights is read once.
//
// The first pass works on (expert, panel of w13): products, activation. The second works
// on panels of w2: each walks the experts in ascending order and adds their weighted
// outputs, so that no output of a single expert is ever stored. Sums are fp32, each of
// them over steps in order: a token's bits depend neither on the rest of the batch nor
// on threads.
#include "experts.h"

#include "kernels.h"
#include "panels.h"

namespace vllm_cpu::VLLM_ISA {

namespace {

constexpr int kPairs = kPanel / 2;
constexpr int kChunkTokens = 512;      // scratch is for so many

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
  int32_t* num_hit;                    // [1]
  int32_t* next;                       // [experts]
  int32_t* row_token;                  // [rows]
  float* row_weight;                   // [rows]
  uint32_t* x;                         // [rows, x_row]
  uint32_t* act;                       // [rows, act_row]
  int64_t bytes;

  Layout(const ExpertsArgs& a, const void* shared) {
    const int64_t tokens = smaller(a.num_tokens, kChunkTokens);
    const int64_t rows = tokens * a.top_k;
    hidden_steps = steps_of<Steps>(a.hidden);
    inner_steps = steps_of<Steps>(a.intermediate);
    inner_panels = (a.intermediate + kPairs - 1) / kPairs;
    out_panels = (a.hidden + kPanel - 1) / kPanel;
    x_row = round_up(hidden_steps * Steps::kWords, 16);
    // A panel writes all of its lanes.
    act_row = round_up(inner_panels * kPairs / Steps::kElems * Steps::kWords, 16);
    uint8_t* at = static_cast<uint8_t*>(const_cast<void*>(shared));
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
    take(num_hit, 1);
  }
};

// Rows of tokens [begin, end), grouped by expert; within one in the tokens' order.
template <class Steps>
void group_rows(const ExpertsArgs& a, int32_t begin, int32_t end,
                const Layout<Steps>& to) {
  *to.num_hit = 0;
  for (int32_t e = 0; e <= a.num_experts; ++e) to.group[e] = 0;
  const int64_t first = static_cast<int64_t>(begin) * a.top_k;
  const int64_t last = static_cast<int64_t>(end) * a.top_k;
  for (int64_t i = first; i < last; ++i) ++to.group[a.ids[i] + 1];
  for (int32_t e = 0; e < a.num_experts; ++e) {
    if (to.group[e + 1] > 0) to.hit[(*to.num_hit)++] = e;
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
    panel_rows<Steps, true>(to - from, c, bias, in.x + from * in.x_row, in.x_row, b,
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
  for (int32_t i = 0; i < *in.num_hit; ++i) {
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
      panel_rows<Steps, true>(to - from, c, bias, in.act + from * in.act_row, in.act_row, b,
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

enum Part { kGroup = 0, kLoad = 1, kUp = 2, kDown = 3 };

// Which tokens a part is about.
struct Chunk {
  int32_t begin, tokens;

  Chunk(const ExpertsArgs& a, int32_t part) {
    begin = part / kExpertsParts * kChunkTokens;
    tokens = static_cast<int32_t>(smaller(kChunkTokens, a.num_tokens - begin));
  }
};

template <class Steps>
int64_t num_items(const ExpertsArgs& a, int32_t part, const void* shared) {
  const Layout<Steps> in(a, shared);
  switch (part % kExpertsParts) {
    case kGroup: return 1;
    case kLoad: return static_cast<int64_t>(Chunk(a, part).tokens) * a.top_k;
    case kUp: return *in.num_hit * in.inner_panels;
    default: return in.out_panels;
  }
}

template <class Steps>
void run_part(const ExpertsArgs& a, int32_t part, int64_t begin, int64_t end,
              void* shared, void* scratch) {
  const Layout<Steps> in(a, shared);
  const Chunk chunk(a, part);
  switch (part % kExpertsParts) {
    case kGroup: return group_rows<Steps>(a, chunk.begin, chunk.begin + chunk.tokens, in);
    case kLoad:
      for (int64_t row = begin; row < end; ++row) {
        load_row<Steps>(a, in.row_token[row], in, row);
      }
      return;
    case kUp:
      for (int64_t i = begin; i < end; ++i) {
        up_panel<Steps>(a, in, in.hit[i / in.inner_panels], i % in.inner_panels);
      }
      return;
    default:
      for (int64_t panel = begin; panel < end; ++panel) {
        down_panel<Steps>(a, in, panel, chunk.begin, chunk.tokens,
                          static_cast<float*>(scratch));
      }
  }
}

int32_t num_parts(const ExpertsArgs& a) {
  return (a.num_tokens + kChunkTokens - 1) / kChunkTokens * kExpertsParts;
}

template <class Steps>
int64_t shared_bytes(const ExpertsArgs& a) {
  return Layout<Steps>(a, nullptr).bytes;
}

int64_t scratch_bytes(const ExpertsArgs& a) {
  return smaller(a.num_tokens, kChunkTokens) * kPanel * 4;
}

template <class Steps>
constexpr ExpertsKernel kKernel = {shared_bytes<Steps>, scratch_bytes, num_parts,
                                   num_items<Steps>, run_part<Steps>};

}  // namespace

const ExpertsKernel* experts(int32_t dtype) {
  if (dtype == kFloat32) return &kKernel<FloatSteps>;
  if (dtype == kFloat16) return &kKernel<Float16Steps>;
  if (dtype == kBFloat16) return &kKernel<BFloat16Steps>;
  return nullptr;
}

}  // namespace vllm_cpu::VLLM_ISA
