// The screened output head; see screen.h for the mathematics.
#include "kernels.h"
#include "screen_rows.h"
#include "team.h"

namespace vllm_cpu::VLLM_ISA {

#if defined(__AVX512BF16__)

namespace {

using namespace screening;

// acc + codes times one unit of a row. GCC 12 does not fold the broadcast.
VLLM_INLINE void add_codes(U& acc, U codes, const int8_t* row) {
  asm volatile("vpdpbusd %2%{1to16%}, %1, %0"
               : "+v"(acc)
               : "v"(codes), "m"(*reinterpret_cast<const uint32_t*>(row)));
}

template <int kRows>
VLLM_INLINE void add_unit(U (&acc)[kRows][kPanelVectors], const uint32_t* codes,
                          const int8_t* row, int64_t row_bytes) {
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v) {
    const U column = u_load(codes + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) add_codes(acc[r][v], column, row + r * row_bytes);
  }
}

// The units of an input in a panel.
template <class Steps>
const uint32_t* units_of_input(const ScreenArgs& a, int64_t panel, int64_t input) {
  const int64_t steps = steps_of<Steps>(a.head.inputs);
  return a.head.weight + (panel * steps + input / Steps::kElems) * kPanel;
}

template <class Steps>
void fetch_outlier(const ScreenArgs& a, const RowBound& row, int64_t panel) {
  if (row.outlier < 0) return;
  const uint32_t* const units = units_of_input<Steps>(a, panel, row.outlier);
  for (int v = 0; v < kPanelVectors; ++v) prefetch_line(units + v * kLanes);
}

// Adds the products of an outlier; what is not finite has an infinite error anyway.
template <class Steps>
VLLM_INLINE F add_outlier(F logit, const RowBound& row, const uint32_t* units) {
  const F w = Steps::element(u_load(units), row.outlier % Steps::kElems);
  const Floats sum = (Floats)fma(set1(row.value), w, logit);
  return (F)(sum - sum == 0.f ? sum : Floats{});
}

// Bounds of the logits of a panel, for kRows rows from `first` on.
template <class Steps, int kRows, bool kFetch>
void bound_block(const ScreenArgs& a, const Layout& s, int64_t panel, int64_t first) {
  const uint32_t* codes = a.codes + panel * s.units * kPanel;
  const int64_t apart = 2 * s.row_bytes;
  const RowBound* const rows = s.bounds() + first;
  const int64_t next = smaller(panel + 1, s.panels - 1);
  for (int r = 0; r < kRows; ++r) fetch_outlier<Steps>(a, rows[r], next);
  U acc[kRows][kPanelVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = u_set1(0);
  }
  const int32_t* const wide = s.wide(first / kRowBlock);
  for (int32_t i = 1; i <= wide[0]; ++i) {
    const int64_t unit = wide[i];
    const int8_t* const high = s.high(first) + unit * kCodesPerUnit;
    add_unit<kRows>(acc, codes + unit * kPanel, high, apart);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Ints start = Ints{} + rows[r].start;
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      acc[r][v] = (U)(((Ints)acc[r][v] << 8) + start);
    }
  }
  const int8_t* row = s.low(first);
  for (int64_t unit = 0; unit < s.units; ++unit, codes += kPanel, row += kCodesPerUnit) {
    if constexpr (kFetch) {
      prefetch_line(codes + kCodeUnitsAhead);
      prefetch_line(codes + kCodeUnitsAhead + 16);
    }
    add_unit<kRows>(acc, codes, row, apart);
  }
  const ScreenBounds& known = a.bounds[panel];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    F upper = set1(-kInfinity), lower = upper;
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      const F step = mul(load(known.step + v * kLanes), set1(rows[r].step));
      F logit = mul(_mm512_cvtepi32_ps(acc[r][v]), step);
      if (rows[r].outlier >= 0) {
        const uint32_t* const units = units_of_input<Steps>(a, panel, rows[r].outlier);
        logit = add_outlier<Steps>(logit, rows[r], units + v * kLanes);
      }
      const F error = fma(set1(rows[r].length), load(known.error + v * kLanes),
                          mul(set1(rows[r].error), load(known.length + v * kLanes)));
      upper = max(upper, add(logit, error));
      lower = max(lower, sub(logit, error));
    }
    s.upper(first + r)[panel] = reduce_max(upper);
    s.lower(first + r)[panel] = reduce_max(lower);
  }
}

template <class Steps, bool kFetch, int kRows = kRowBlock>
void bound_rows(const ScreenArgs& a, const Layout& s, int64_t panel, int64_t first,
                int64_t rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return bound_block<Steps, kRows, kFetch>(a, s, panel, first);
    bound_rows<Steps, kFetch, kRows - 1>(a, s, panel, first, rows);
  }
}

template <class Steps>
void bound_panel(const ScreenArgs& a, const Layout& s, int64_t panel) {
  for (int64_t first = 0; first < s.rows; first += kRowBlock) {
    const int64_t rows = smaller(kRowBlock, s.rows - first);
    if (first == 0) {
      bound_rows<Steps, true>(a, s, panel, first, rows);
    } else {
      bound_rows<Steps, false>(a, s, panel, first, rows);
    }
  }
}

// A number as the type of logits has it.
template <int kType>
float rounded(float x) {
  uint8_t narrow[4];
  store_from_float<kType>(narrow, set1(x), 1);
  alignas(64) float lanes[kLanes];
  store(lanes, load_as_float<kType>(narrow, 1));
  return lanes[0];
}

float largest_of(const float* x, int64_t count) {
  F most = set1(-kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) most = max(load(x + i), most);
  float found = reduce_max(most);
  for (; i < count; ++i) found = x[i] > found ? x[i] : found;
  return found;
}

// The largest logit of one row in one panel.
template <class Steps>
Choice multiply(const ScreenArgs& a, const Layout& s, int64_t row, int64_t panel) {
  const int64_t steps = steps_of<Steps>(a.head.inputs);
  alignas(64) float logits[kPanel];
  panel_block<Steps, 1, true>(logits, nullptr, s.exact(row), 0,
                               a.head.weight + panel * steps * kPanel, steps);
  const int64_t count = smaller(kPanel, a.head.outputs - panel * kPanel);
  Choice choice;
  for (int64_t i = 0; i < count; ++i) {
    choice.see(panel * kPanel + i, rounded<Steps::kDType>(logits[i]));
  }
  return choice;
}

// The most promising panel says more than its bound does.
template <class Steps>
void learn_least(const ScreenArgs& a, const Layout& s, int64_t row) {
  RowBound& bound = s.bounds()[row];
  const float* const lower = s.lower(row);
  const float largest = largest_of(lower, s.panels);
  float least = rounded<Steps::kDType>(largest);
  int64_t panel = 0;
  while (panel < s.panels && lower[panel] != largest) ++panel;
  if (panel < s.panels) {
    const float logit = multiply<Steps>(a, s, row, panel).logit;
    if (logit > least) least = logit;
  }
  bound.least = least;
  // Subnormal float16 included.
  bound.far = least - __builtin_fabsf(least) * 0x1p-6f - 1e-6f;
}

template <int kType>
bool may_win(const RowBound& bound, float upper) {
  if (bound.whole) return true;
  return !(upper < bound.far) && !(rounded<kType>(upper) < bound.least);
}

// Every row's choice among panels of one run.
template <class Steps>
void multiply_run(const ScreenArgs& a, const Layout& s, int64_t run) {
  for (int64_t row = 0; row < s.rows; ++row) s.choices(row)[run] = {};
  const int64_t end = smaller(s.panels, (run + 1) * kRunPanels);
  for (int64_t panel = run * kRunPanels; panel < end; ++panel) {
    for (int64_t row = 0; row < s.rows; ++row) {
      if (!may_win<Steps::kDType>(s.bounds()[row], s.upper(row)[panel])) continue;
      const Choice found = multiply<Steps>(a, s, row, panel);
      s.choices(row)[run].see(found.token, found.logit);
    }
  }
}

void choose(const ScreenArgs& a, const Layout& s, int64_t row) {
  Choice choice;
  for (int64_t run = 0; run < s.runs; ++run) {
    choice.see(s.choices(row)[run].token, s.choices(row)[run].logit);
  }
  a.tokens[row] = choice.token;
}

template <class Steps>
void run(const ScreenArgs& a, int32_t part, int64_t begin, int64_t end, void* shared) {
  const Layout s = layout<Steps>(a, shared);
  for (int64_t item = begin; item < end; ++item) {
    switch (part) {
      case kScreenRows: narrow_rows<Steps>(a, s, item); break;
      case kScreenBound: bound_panel<Steps>(a, s, item); break;
      case kScreenLeast: learn_least<Steps>(a, s, item); break;
      case kScreenMultiply: multiply_run<Steps>(a, s, item); break;
      default: choose(a, s, item);
    }
  }
}

int64_t num_items(const ScreenArgs& a, int32_t part) {
  const Layout s(a, nullptr, 0);
  switch (part) {
    case kScreenRows: return s.blocks;
    case kScreenBound: return s.panels;
    case kScreenMultiply: return s.runs;
    default: return s.rows;
  }
}

template <class Steps>
int64_t shared_bytes(const ScreenArgs& a) {
  return layout<Steps>(a, nullptr).num_bytes();
}

Stretch reads(const ScreenArgs& a, int64_t begin, int64_t end) {
  const int64_t units = Layout(a, nullptr, 0).units * kPanel;
  return {reinterpret_cast<const uint8_t*>(a.codes + begin * units),
          (end - begin) * units * 4};
}

// Inputs from `unit` of codes on, of kLanes outputs each; 0 past their end.
template <class Steps>
VLLM_INLINE void load_unit(const uint32_t* panel, int64_t unit, int64_t steps,
                           Floats (&w)[kCodesPerUnit]) {
  constexpr int kSteps = kCodesPerUnit / Steps::kElems;
#pragma GCC unroll 4
  for (int i = 0; i < kSteps; ++i) {
    const int64_t step = unit * kSteps + i;
    const U units = step < steps ? u_load(panel + step * kPanel) : u_set1(0);
#pragma GCC unroll 2
    for (int j = 0; j < Steps::kElems; ++j) {
      w[i * Steps::kElems + j] = (Floats)Steps::element(units, j);
    }
  }
}

template <class Steps>
void pack_vector(const ScreenArgs& a, int64_t panel, int from) {
  const int64_t inputs = a.head.inputs, units = Layout(a, nullptr, 0).units;
  const int64_t steps = steps_of<Steps>(inputs);
  const uint32_t* const weight = a.head.weight + panel * steps * kPanel + from;
  Floats w[kCodesPerUnit];
  Floats most = {};
  for (int64_t unit = 0; unit < units; ++unit) {
    load_unit<Steps>(weight, unit, steps, w);
#pragma GCC unroll 4
    for (int j = 0; j < kCodesPerUnit; ++j) {
      most = (Floats)max((F)most, (F)(w[j] < 0 ? -w[j] : w[j]));
    }
  }
  const Floats step = most * (1.f / 127.f);
  const Floats factor = step > 1e-30f ? 1.f / step : Floats{};
  Floats errors = {}, lengths = {};
  uint32_t* const codes = a.codes + panel * units * kPanel + from;
  for (int64_t unit = 0; unit < units; ++unit) {
    Ints four = {};
    load_unit<Steps>(weight, unit, steps, w);
#pragma GCC unroll 4
    for (int j = 0; j < kCodesPerUnit; ++j) {
      const Floats near = (Floats)round((F)(w[j] * factor));
      const Floats missing = w[j] - near * step;
      errors += missing * missing;
      lengths += w[j] * w[j];
      four |= ((__builtin_convertvector(near, Ints) + 128) & 255) << 8 * j;
    }
    u_store(codes + unit * kPanel, (U)four);
  }
  ScreenBounds& bounds = a.bounds[panel];
  for (int i = 0; i < kLanes; ++i) {
    const bool known = lengths[i] < 1e30f && panel * kPanel + from + i < a.head.outputs;
    // A weight whose square is too small for float32 is no weight.
    const float least = 1e-18f * static_cast<float>(inputs);
    bounds.step[from + i] = known && factor[i] > 0.f ? step[i] : 0.f;
    bounds.error[from + i] =
        known ? kUp * __builtin_sqrtf(errors[i]) + least : kInfinity;
    bounds.length[from + i] =
        known ? kUp * __builtin_sqrtf(lengths[i]) + least : kInfinity;
  }
}

template <class Steps>
void pack(const ScreenArgs& a, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int from = 0; from < kPanel; from += kLanes) pack_vector<Steps>(a, panel, from);
  }
}

template <class Steps>
constexpr ScreenKernel kKernel = {shared_bytes<Steps>, num_items, run<Steps>, reads,
                                  pack<Steps>};

}  // namespace

const ScreenKernel* screen(int32_t dtype) {
  if (dtype == kFloat32) return &kKernel<FloatSteps>;
  if (dtype == kBFloat16) return &kKernel<BFloat16Steps>;
  if (dtype == kFloat16) return &kKernel<Float16Steps>;
  return nullptr;
}

#else

// Without products of bytes a screen costs what it spares.
const ScreenKernel* screen(int32_t) { return nullptr; }

#endif

}  // namespace vllm_cpu::VLLM_ISA
