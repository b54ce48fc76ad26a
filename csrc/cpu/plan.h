// Cuts a batch into work items of similar cost. Knows no cell format and no vectors.
#pragma once

#include <stdint.h>

#include <vector>

#include "work.h"

namespace vllm_cpu {

// `status`, and which request is at fault.
struct Checked {
  Status status = kOk;
  int32_t request = 0;
};

struct Plan {
  std::vector<WorkItem> items;
  std::vector<WorkItem> merges;    // whole tiles whose chunks several items leave behind
  std::vector<float> partials;
  int64_t num_chunks = 0;          // over all tiles: the amount of work
};

// Everything read through an index is checked here, before a kernel runs.
Checked check(const AttentionArgs& args);

// About how many cycles the call takes on one thread.
int64_t estimated_cycles(const AttentionArgs& args);

Plan make_plan(const AttentionArgs& args, const AttentionKernel& kernel,
               int num_threads);

}  // namespace vllm_cpu
