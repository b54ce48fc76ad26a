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

}  // namespace vllm_cpu
