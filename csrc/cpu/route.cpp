#include "route.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace vllm_cpu {
namespace {

constexpr float kMinSum = 1e-20f;  // keeps the sum of weights above 0
constexpr float kLowest = -std::numeric_limits<float>::infinity();

void widen(const void* logits, int32_t dtype, int32_t count, float* to) {
  const auto* const halves = static_cast<const uint16_t*>(logits);
  switch (dtype) {
    case kFloat32: memcpy(to, logits, count * sizeof(float)); return;
    case kFloat16:
      for (int32_t e = 0; e < count; ++e) to[e] = vllm_common::f16_value(halves[e]);
      return;
    default:
      for (int32_t e = 0; e < count; ++e) to[e] = vllm_common::bf16_value(halves[e]);
  }
}

void scores_of(const RouteArgs& a, const void* logits, int32_t dtype, float* scores) {
  widen(logits, dtype, a.num_experts, scores);
  if (a.sigmoid) {
    for (int32_t e = 0; e < a.num_experts; ++e) {
      scores[e] = 1.f / (1.f + std::exp(-scores[e]));
    }
    return;
  }
  const float most = *std::max_element(scores, scores + a.num_experts);
  float sum = 0.f;
  for (int32_t e = 0; e < a.num_experts; ++e) {
    scores[e] = std::exp(scores[e] - most);
    sum += scores[e];
  }
  for (int32_t e = 0; e < a.num_experts; ++e) scores[e] /= sum;
}

// The index of the largest value, which is then taken out of the running.
int32_t take_largest(float* values, int32_t count) {
  const auto best = static_cast<int32_t>(std::max_element(values, values + count) - values);
  values[best] = kLowest;
  return best;
}

// Puts experts outside of the best groups at `lowest`.
void keep_best_groups(const RouteArgs& a, float* choice, float lowest, float* scratch) {
  const int32_t size = a.num_experts / a.num_groups;
  float* const worth = scratch;
  float* const members = scratch + a.num_groups;
  for (int32_t g = 0; g < a.num_groups; ++g) {
    std::copy(choice + g * size, choice + (g + 1) * size, members);
    worth[g] = 0.f;
    for (int32_t i = 0; i < a.scores_per_group; ++i) {
      const float best = *std::max_element(members, members + size);
      take_largest(members, size);
      worth[g] += best;
    }
  }
  float* const kept = members;  // the best groups, marked
  std::fill(kept, kept + a.num_groups, 0.f);
  for (int32_t i = 0; i < a.topk_groups; ++i) kept[take_largest(worth, a.num_groups)] = 1.f;
  for (int32_t e = 0; e < a.num_experts; ++e) {
    if (kept[e / size] == 0.f) choice[e] = lowest;
  }
}

}  // namespace

void route_row(const RouteArgs& a, const void* logits, int32_t dtype, int64_t row,
               float* scratch) {
  float* const scores = scratch;
  float* const choice = scratch + a.num_experts;
  scores_of(a, logits, dtype, scores);
  for (int32_t e = 0; e < a.num_experts; ++e) {
    choice[e] = scores[e] + (a.bias == nullptr ? 0.f : a.bias[e]);
  }
  if (a.num_groups > 0) {
    keep_best_groups(a, choice, a.bias == nullptr ? 0.f : kLowest,
                     scratch + 2 * a.num_experts);
  }
  int64_t* const ids = a.ids + row * a.top_k;
  float* const weights = a.weights + row * a.top_k;
  float sum = 0.f;
  for (int32_t i = 0; i < a.top_k; ++i) {
    const auto best = static_cast<int32_t>(
        std::max_element(choice, choice + a.num_experts) - choice);
    // Without a bias a weight is what was chosen by: 0 outside of the best groups.
    weights[i] = a.bias == nullptr ? choice[best] : scores[best];
    ids[i] = best;
    choice[best] = kLowest;
    sum += weights[i];
  }
  const float factor = a.renormalize ? a.scale / (sum + kMinSum) : a.scale;
  for (int32_t i = 0; i < a.top_k; ++i) weights[i] *= factor;
}

}  // namespace vllm_cpu
