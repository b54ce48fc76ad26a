// Chooses the experts of one token. Knows scores, groups and biases; no vectors.
#pragma once

#include "step.h"

namespace vllm_cpu {

// `logits`: [num_experts] of type `dtype`, of row `row`. `scratch`: 4 * num_experts
// floats.
void route_row(const RouteArgs& args, const void* logits, int32_t dtype, int64_t row,
               float* scratch);

}  // namespace vllm_cpu
