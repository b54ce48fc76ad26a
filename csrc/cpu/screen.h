// The C ABI of a screened output head: every row's most likely token, without its logits.
//
// Beside its panels (linear.h) the head's weight has codes of one byte. Products of codes
// take half the memory of bf16 and half its multiplications, and bound every logit on
// both sides. Only panels whose upper bounds reach a row's largest lower bound are
// multiplied exactly, as the linear kernel would: the token is that of the logits, the
// first of equally likely ones.
//
// A weight w is step * code + e, a row x is row_step * whole + d, with codes of 8 and
// wholes of 16 bits, so that |x w - row_step * step * whole * code| is at most
// |row_step * whole| |e| + |d| |w| (Cauchy and Schwarz). An element that has much of a
// row's length is not part of x here: it is multiplied exactly.
//
// vllm/model_executor/layers/screened_head.py mirrors the struct.
#pragma once

#include <stdint.h>

#include "linear.h"

namespace vllm_cpu {

constexpr int kCodesPerUnit = 4;

// What is known of the outputs of a panel. Outputs that the panel does not have, or whose
// weights are not finite, have an infinite error.
struct ScreenBounds {
  float step[kPanel];
  float error[kPanel];   // at least |e|
  float length[kPanel];  // at least |w|
};

struct ScreenArgs {
  LinearArgs head;       // of logits that are not written, without a bias
  uint32_t* codes;       // [panels, units of kCodesPerUnit inputs, kPanel]; 128 added
  ScreenBounds* bounds;  // [panels]
  int64_t* tokens;       // [num_rows]
};

// Parts of a call, one after another: rows become whole numbers, panels are bounded, rows
// learn what a panel must reach, panels that do are multiplied, tokens are chosen.
enum ScreenPart : int32_t {
  kScreenRows,
  kScreenBound,
  kScreenLeast,
  kScreenMultiply,
  kScreenChoose,
  kScreenParts,
};

// The screen of one instruction set, for one type.
struct ScreenKernel {
  int64_t (*shared_bytes)(const ScreenArgs&);  // of all threads
  int64_t (*num_items)(const ScreenArgs&, int32_t part);
  void (*run)(const ScreenArgs&, int32_t part, int64_t begin, int64_t end, void* shared);
  // The codes of panels [begin, end).
  Stretch (*reads)(const ScreenArgs&, int64_t begin, int64_t end);
  // Writes codes and bounds of panels [begin, end).
  void (*pack)(const ScreenArgs&, int64_t begin, int64_t end);
};

}  // namespace vllm_cpu
