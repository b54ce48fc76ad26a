// The C ABI of a linear layer over packed weights.
//
// vllm/model_executor/layers/panel_weight.py mirrors the struct and packs the weights.
#pragma once

#include <stdint.h>

namespace vllm_cpu {

struct Stretch;

// A weight [outputs, inputs] is cut into panels of kPanel outputs. A panel is stored
// step by step: of each output one 32-bit unit, a float or two of 16 bits that follow each
// other in the row. What is missing to whole units and panels is 0.
constexpr int kPanel = 32;

struct LinearArgs {
  void* out;               // [num_rows, outputs]
  const void* x;           // [num_rows, inputs]
  const uint32_t* weight;  // [panels, steps, kPanel]
  const float* bias;       // [panels * kPanel] or null
  int64_t out_stride;      // elements from row to row
  int64_t x_stride;
  int32_t num_rows;
  int32_t inputs;
  int32_t outputs;
  int32_t dtype;           // of out, x and the weight
};

// Linear layers of one instruction set, for one type. Work is cut into items: a block of
// rows by one panel, panels of a block after one another.
struct LinearKernel {
  int64_t (*scratch_bytes)(const LinearArgs&);  // per thread
  int64_t (*num_items)(const LinearArgs&);
  void (*run)(const LinearArgs&, int64_t begin, int64_t end, void* scratch);
  // The panels of items [begin, end), as far as they lie one after another.
  Stretch (*reads)(const LinearArgs&, int64_t begin, int64_t end);
  // out [num_rows, inputs] = the rows `ids` of the weight, times `scale`.
  void (*gather)(const LinearArgs&, const int64_t* ids, float scale);
};

}  // namespace vllm_cpu
