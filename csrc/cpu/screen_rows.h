// The rows of a screened output head: hidden states as whole numbers, and what is known
// of how far these are off.
#pragma once

#include <string.h>

#include "panels.h"
#include "screen.h"

#if defined(__AVX512BF16__)
namespace vllm_cpu::VLLM_ISA::screening {

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

constexpr int kRowBlock = 8;           // 8 x kPanelVectors registers of sums
constexpr float kClip = 6.f / 127.f;   // of a row's root mean square is one step
constexpr float kUp = 1.001f;          // more than a sum of squares is rounded
constexpr int64_t kCodeUnitsAhead = 1024;
constexpr int kRunPanels = 16;         // multiplied by one thread, where they need be
constexpr float kOutlier = 1.f / 4.f;  // has at least this part of the sum of squares
constexpr float kInfinity = __builtin_inff();

// What is known of a row.
struct RowBound {
  float step;
  float length;   // at least |row_step * whole|
  float error;    // at least |d|, and what float32 rounds
  int32_t start;  // what the sums with 128 added to the codes start from
  bool whole;     // nothing is known: every panel counts
  float least;    // the most likely token's logit has at least this
  float far;      // what is below this is below `least`, however it is rounded
  int32_t outlier;  // the input that is multiplied exactly, or -1
  float value;      // of the outlier
};

// The most likely token so far. NaN is never likely.
struct Choice {
  int64_t token = 0;
  float logit = -kInfinity;

  void see(int64_t other, float x) {
    if (!(x > logit)) return;
    token = other;
    logit = x;
  }
};

// How the shared memory is used.
struct Layout {
  int64_t rows, panels, units, row_bytes, blocks, runs, words;
  uint8_t* data;

  Layout(const ScreenArgs& a, void* shared, int64_t words_of_row)
      : words(words_of_row), data(static_cast<uint8_t*>(shared)) {
    rows = a.head.num_rows;
    panels = (a.head.outputs + kPanel - 1) / kPanel;
    units = (a.head.inputs + kCodesPerUnit - 1) / kCodesPerUnit;
    row_bytes = round_up(units * kCodesPerUnit, 64);
    blocks = (rows + kRowBlock - 1) / kRowBlock;
    runs = (panels + kRunPanels - 1) / kRunPanels;
  }
  // The last eight bits of whole numbers, then what is above.
  int8_t* low(int64_t row) const {
    return reinterpret_cast<int8_t*>(data + row * 2 * row_bytes);
  }
  int8_t* high(int64_t row) const { return low(row) + row_bytes; }
  RowBound* bounds() const {
    return reinterpret_cast<RowBound*>(data + rows * 2 * row_bytes);
  }
  // Units in which a row of the block has more than eight bits: their number first.
  int32_t* wide(int64_t block) const {
    return reinterpret_cast<int32_t*>(data + rows * (2 * row_bytes + 64)) +
           block * (units + 1);
  }
  float* lower(int64_t row) const {
    const int64_t lists = round_up(blocks * (units + 1) * 4, 64);
    return reinterpret_cast<float*>(data + rows * (2 * row_bytes + 64) + lists) +
           row * 2 * panels;
  }
  float* upper(int64_t row) const { return lower(row) + panels; }
  // The row as the linear kernel takes it.
  uint32_t* exact(int64_t row) const {
    const int64_t bytes = round_up(rows * 2 * panels * 4, 64);
    return reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(lower(0)) + bytes) +
           row * words;
  }
  // Of each run of panels.
  Choice* choices(int64_t row) const {
    return reinterpret_cast<Choice*>(exact(rows)) + row * runs;
  }
  int64_t num_bytes() const {
    return reinterpret_cast<uint8_t*>(choices(rows)) - data;
  }
};
static_assert(sizeof(RowBound) <= 64);

template <class Steps>
Layout layout(const ScreenArgs& a, void* shared) {
  return {a, shared, words_of_row<Steps>(a.head.inputs)};
}

template <int kType>
Floats load_row(const ScreenArgs& a, int64_t row, int64_t i) {
  constexpr int kBytes = dtype_bytes(kType);
  const auto* const x = static_cast<const uint8_t*>(a.head.x) +
                        (row * a.head.x_stride + i) * kBytes;
  return (Floats)load_as_float<kType>(
      x, static_cast<int>(smaller(kLanes, a.head.inputs - i)));
}

// ... and without its outlier.
template <int kType>
Floats load_rest(const ScreenArgs& a, const RowBound& bound, int64_t row, int64_t i) {
  Floats x = load_row<kType>(a, row, i);
  const int64_t lane = bound.outlier - i;
  if (lane >= 0 && lane < kLanes) x[lane] = 0.f;
  return x;
}

// One element may have most of a hidden state's length, and with it of the bound of what
// codes err by. It is set apart.
template <int kType>
void find_outlier(const ScreenArgs& a, RowBound& bound, int64_t row, float square) {
  Floats squares = {};
  for (int64_t i = 0; i < a.head.inputs; i += kLanes) {
    const Floats x = load_row<kType>(a, row, i);
    squares = (Floats)max((F)squares, (F)(x * x));
  }
  const float largest = reduce_max((F)squares);
  if (largest < kOutlier * square) return;
  for (int32_t i = 0; i < a.head.inputs; ++i) {
    const float x = load_row<kType>(a, row, i)[0];
    if (x * x != largest) continue;
    bound.outlier = i;
    bound.value = x;
    return;
  }
}

// Sixteen whole numbers, their low and their high bytes.
VLLM_INLINE void store_whole(Ints whole, int8_t* low, int8_t* high) {
  const Ints above = (whole + 128) >> 8;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8((U)whole));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8((U)above));
}

template <int kType>
void narrow_row(const ScreenArgs& a, const Layout& s, int64_t row) {
  const int64_t inputs = a.head.inputs;
  Floats squares = {};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const Floats x = load_row<kType>(a, row, i);
    squares += x * x;
  }
  const float square = reduce_add((F)squares);
  RowBound& bound = s.bounds()[row];
  bound = {};
  bound.error = kInfinity;
  bound.whole = true;
  bound.outlier = -1;
  memset(s.low(row), 0, static_cast<size_t>(2 * s.row_bytes));
  if (!(square > 1e-20f && square < 1e30f)) return;  // NaN, too
  bound.whole = false;
  find_outlier<kType>(a, bound, row, square);

  Floats rest = {};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const Floats x = load_rest<kType>(a, bound, row, i);
    rest += x * x;
  }
  const float mean = reduce_add((F)rest) / static_cast<float>(inputs);
  const float step = mean > 1e-30f ? kClip * __builtin_sqrtf(mean) : 1.f;
  const float factor = 1.f / step;
  Floats lengths = {}, errors = {};
  Ints sum = {};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const Floats x = load_rest<kType>(a, bound, row, i);
    const Floats near = (Floats)round((F)(x * factor));
    const Floats made = near * step, missing = x - made;
    const Ints whole = __builtin_convertvector(near, Ints);
    lengths += made * made;
    errors += missing * missing;
    sum += whole;
    store_whole(whole, s.low(row) + i, s.high(row) + i);
  }
  // A float32 sum of n products errs by less than n 2^-23 |x| |w|, here and in logits.
  const float rounding = static_cast<float>(inputs + 64) * 0x1p-21f;
  bound.step = step;
  bound.length = kUp * __builtin_sqrtf(reduce_add((F)lengths));
  bound.error = kUp * (__builtin_sqrtf(reduce_add((F)errors)) +
                       rounding * __builtin_sqrtf(square));
  bound.start = -128 * _mm512_reduce_add_epi32((U)sum);
}

inline void list_wide_units(const Layout& s, int64_t block) {
  const int64_t end = smaller(s.rows, (block + 1) * kRowBlock);
  int32_t* const list = s.wide(block);
  int32_t count = 0;
  for (int64_t unit = 0; unit < s.units; ++unit) {
    uint32_t any = 0;
    for (int64_t row = block * kRowBlock; row < end; ++row) {
      uint32_t bytes;
      memcpy(&bytes, s.high(row) + unit * kCodesPerUnit, sizeof bytes);
      any |= bytes;
    }
    if (any != 0) list[++count] = static_cast<int32_t>(unit);
  }
  list[0] = count;
}

template <class Steps>
void narrow_rows(const ScreenArgs& a, const Layout& s, int64_t block) {
  const int64_t end = smaller(s.rows, (block + 1) * kRowBlock);
  for (int64_t row = block * kRowBlock; row < end; ++row) {
    narrow_row<Steps::kDType>(a, s, row);
    copy_row<Steps>(a.head, row, s.exact(row));
  }
  list_wide_units(s, block);
}

}  // namespace vllm_cpu::VLLM_ISA::screening
#endif
