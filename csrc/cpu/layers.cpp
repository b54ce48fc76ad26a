// Single layers, each as a step of one operation.
#include "runtime.h"
#include "step.h"
#include "work.h"

using namespace vllm_cpu;

VLLM_EXPORT int64_t vllm_cpu_linear_abi() { return sizeof(LinearArgs); }

// One linear layer by itself.
VLLM_EXPORT int64_t vllm_cpu_linear(LinearArgs* args) {
  StepOp op = {};
  op.kind = kStepLinear;
  op.args = args;
  StepInputs in = {};
  in.num_tokens = args->num_rows;
  return run_step(&op, 1, in);
}

// Rows of a packed weight: out [num_rows, inputs]. Ids must be within the weight.
VLLM_EXPORT int64_t vllm_cpu_gather(LinearArgs* args, const int64_t* ids) {
  StepOp op = {};
  op.kind = kStepEmbed;
  op.size = args->inputs;
  op.limit = args->outputs;
  op.scale = 1.f;
  op.args = args;
  StepInputs in = {};
  in.num_tokens = args->num_rows;
  in.token_ids = ids;
  return run_step(&op, 1, in);
}

// The size of the struct that the next function takes, for the same purpose.
VLLM_EXPORT int64_t vllm_cpu_experts_abi() { return sizeof(ExpertsArgs); }

// Writes the weighted sum of every token's experts. 0, or a Status; nothing is written
// before ids are checked.
VLLM_EXPORT int64_t vllm_cpu_experts(ExpertsArgs* args) {
  const int64_t pairs = static_cast<int64_t>(args->num_tokens) * args->top_k;
  for (int64_t i = 0; i < pairs; ++i) {
    if (args->ids[i] < 0 || args->ids[i] >= args->num_experts) return kBadExpert;
  }
  StepOp op = {};
  op.kind = kStepExperts;
  op.heads = 1;
  op.args = args;
  StepInputs in = {};
  in.num_tokens = args->num_tokens;
  return run_step(&op, 1, in);
}

// The size of the struct that the next functions take, for the same purpose.
VLLM_EXPORT int64_t vllm_cpu_screen_abi() { return sizeof(ScreenArgs); }

// Writes codes and bounds of a head's weight. 0, or kUnsupported.
VLLM_EXPORT int64_t vllm_cpu_screen_pack(const ScreenArgs* args) {
  const ScreenKernel* const kernel = kernels().screen(args->head.dtype);
  if (kernel == nullptr) return kUnsupported;
  const int64_t panels = (args->head.outputs + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static) if (panels * args->head.inputs > 1 << 14)
  for (int64_t panel = 0; panel < panels; ++panel) kernel->pack(*args, panel, panel + 1);
  return kOk;
}

// The most likely tokens of rows.
VLLM_EXPORT int64_t vllm_cpu_screen(ScreenArgs* args) {
  StepOp op = {};
  op.kind = kStepLikeliest;
  op.args = args;
  StepInputs in = {};
  in.num_tokens = args->head.num_rows;
  return run_step(&op, 1, in);
}
