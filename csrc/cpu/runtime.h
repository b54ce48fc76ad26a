// What the units that are compiled once share: the chosen table and memory of threads.
#pragma once

#include "work.h"

#define VLLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace vllm_cpu {

// The kernels of the instruction set in use.
const KernelTable& kernels();

// At least `bytes` of this thread's own memory, 64-byte aligned, until its next call;
// null where there is no more.
void* thread_scratch(int64_t bytes);

// Runs a plan. 0, or a Status in the low 8 bits and the request, token or operation at
// fault above them; nothing is written before everything is checked.
int64_t run_step(const StepOp* ops, int32_t num_ops, const StepInputs& inputs);

}  // namespace vllm_cpu
