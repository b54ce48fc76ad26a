// Linear layers: every row times a packed weight, in any number of rows.
#include "linear.h"

#include "kernels.h"
#include "panels.h"
#include "team.h"

namespace vllm_cpu::VLLM_ISA {

namespace {

constexpr int64_t kBlockBytes = 384 << 10;  // of rows that stay in the second-level cache
constexpr int64_t kMostBlockRows = 128;

template <class Steps>
struct Shape {
  int64_t steps, panels, row_words, block_rows, blocks;
  bool copies;  // rows of x are brought into another form

  explicit Shape(const LinearArgs& a) {
    steps = steps_of<Steps>(a.inputs);
    panels = (a.outputs + kPanel - 1) / kPanel;
    row_words = words_of_row<Steps>(a.inputs);
    const int64_t fitting = kBlockBytes / (row_words * 4) / Steps::kMaxRows;
    block_rows = smaller(kMostBlockRows, larger(4, fitting) * Steps::kMaxRows);
    blocks = (a.num_rows + block_rows - 1) / block_rows;
    copies = Steps::kDType != Steps::kRowDType || a.inputs % Steps::kElems != 0 ||
             a.x_stride % Steps::kElems != 0;
  }
};

template <class Steps>
void write_rows(const LinearArgs& a, int64_t first_row, int rows, int64_t panel,
                const float* c) {
  constexpr int kBytes = dtype_bytes(Steps::kDType);
  const int64_t width = smaller(kPanel, a.outputs - panel * kPanel);
  for (int r = 0; r < rows; ++r) {
    uint8_t* const out = static_cast<uint8_t*>(a.out) +
                         ((first_row + r) * a.out_stride + panel * kPanel) * kBytes;
    for (int64_t i = 0; i < width; i += kLanes) {
      store_from_float<Steps::kDType>(out + i * kBytes, load(c + r * kPanel + i),
                                      static_cast<int>(smaller(kLanes, width - i)));
    }
  }
}

template <class Steps>
void run_item(const LinearArgs& a, const Shape<Steps>& s, int64_t block, int64_t panel,
              uint32_t* scratch) {
  const uint32_t* const b = a.weight + panel * s.steps * kPanel;
  const float* const bias = a.bias == nullptr ? nullptr : a.bias + panel * kPanel;
  const int64_t first = block * s.block_rows;
  const auto rows = static_cast<int>(smaller(s.block_rows, a.num_rows - first));
  const int pieces = (rows + Steps::kMaxRows - 1) / Steps::kMaxRows;
  alignas(64) float c[Steps::kMaxRows * kPanel];
  for (int piece = 0; piece < pieces; ++piece) {
    const int begin = rows * piece / pieces;  // pieces of nearly equal height
    const int end = rows * (piece + 1) / pieces;
    const uint32_t* x = scratch;
    int64_t x_row = s.row_words;
    if (s.copies) {
      for (int r = begin; r < end; ++r) {
        copy_row<Steps>(a, first + r, scratch + (r - begin) * s.row_words);
      }
    } else {
      x_row = a.x_stride * Steps::kWords / Steps::kElems;
      x = static_cast<const uint32_t*>(a.x) + (first + begin) * x_row;
    }
    if (piece == 0) {
      panel_rows<Steps, true>(end - begin, c, bias, x, x_row, b, s.steps);
    } else {
      panel_rows<Steps, false>(end - begin, c, bias, x, x_row, b, s.steps);
    }
    write_rows<Steps>(a, first + begin, end - begin, panel, c);
  }
}

template <class Steps>
void run(const LinearArgs& a, int64_t begin, int64_t end, void* scratch) {
  const Shape<Steps> s(a);
  for (int64_t i = begin; i < end; ++i) {
    run_item<Steps>(a, s, i / s.panels, i % s.panels, static_cast<uint32_t*>(scratch));
  }
}

template <class Steps>
int64_t num_items(const LinearArgs& a) {
  const Shape<Steps> s(a);
  return s.blocks * s.panels;
}

template <class Steps>
Stretch reads(const LinearArgs& a, int64_t begin, int64_t end) {
  const Shape<Steps> s(a);
  const int64_t panel = begin % s.panels;
  const int64_t count = smaller(end - begin, s.panels - panel);
  const int64_t units = s.steps * kPanel;
  return {reinterpret_cast<const uint8_t*>(a.weight + panel * units), count * units * 4};
}

template <class Steps>
int64_t scratch_bytes(const LinearArgs& a) {
  return Steps::kMaxRows * Shape<Steps>(a).row_words * 4;
}

// Elements of a row lie a panel's step apart.
template <class Steps>
void gather(const LinearArgs& a, const int64_t* ids, float scale) {
  constexpr int kBytes = dtype_bytes(Steps::kDType);
  const Shape<Steps> s(a);
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const uint32_t* const units =
        a.weight + ids[row] / kPanel * s.steps * kPanel + ids[row] % kPanel;
    uint8_t* const out = static_cast<uint8_t*>(a.out) + row * a.out_stride * kBytes;
    alignas(64) uint32_t line[kLanes];
    constexpr int kLineElems = kLanes * Steps::kElems;
    for (int64_t i = 0; i < a.inputs; i += kLineElems) {
      const int64_t first = i / Steps::kElems;
      const int64_t count = smaller(kLanes, s.steps - first);
      for (int64_t j = 0; j < count; ++j) line[j] = units[(first + j) * kPanel];
      for (int64_t j = 0; j < kLineElems && i + j < a.inputs; j += kLanes) {
        const auto left = static_cast<int>(smaller(kLanes, a.inputs - i - j));
        const F x = load_as_float<Steps::kDType>(
            reinterpret_cast<const uint8_t*>(line) + j * kBytes, left);
        store_from_float<Steps::kDType>(out + (i + j) * kBytes, mul(x, set1(scale)), left);
      }
    }
  }
}

template <class Steps>
constexpr LinearKernel kKernel = {scratch_bytes<Steps>, num_items<Steps>, run<Steps>,
                                  reads<Steps>, gather<Steps>};

}  // namespace

const LinearKernel* linear(int32_t dtype) {
  if (dtype == kFloat32) return &kKernel<FloatSteps>;
  if (dtype == kFloat16) return &kKernel<Float16Steps>;
  if (dtype == kBFloat16) return &kKernel<BFloat16Steps>;
  return nullptr;
}

}  // namespace vllm_cpu::VLLM_ISA
