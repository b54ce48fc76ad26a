// Goes through a step plan: fills in what is new in this step, cuts every operation into
// items and lets a team of threads do them.
#include "step.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "plan.h"
#include "route.h"
#include "runtime.h"
#include "team.h"

namespace vllm_cpu {
namespace {

// Below so many elements an operation is left to one thread.
constexpr int64_t kSerialElements = 1 << 13;
constexpr int64_t kItemsPerThread = 8;
constexpr int64_t kStoreCost = 4;  // of an element, in those of a simple operation

// One way of cutting attention, shared by the layers that it fits.
struct AttentionPlan {
  const AttentionArgs* like;
  const AttentionKernel* kernel;
  Plan plan;

  bool fits(const AttentionArgs& a, const AttentionKernel* k) const {
    const AttentionArgs& b = *like;
    return k == kernel && a.block_table == b.block_table &&
           a.query_start_loc == b.query_start_loc && a.seq_lens == b.seq_lens &&
           a.pages.num_heads == b.pages.num_heads &&
           a.pages.block_size == b.pages.block_size &&
           a.pages.num_blocks == b.pages.num_blocks &&
           a.num_query_heads == b.num_query_heads && a.query.size == b.query.size &&
           a.out.size == b.out.size && a.sliding_window == b.sliding_window &&
           a.causal == b.causal;
  }
};

struct Failure {
  Status status = kOk;
  int32_t where = 0;
};

class StepRunner : public PhaseRunner {
 public:
  StepRunner(const StepOp* ops, int32_t num_ops, const StepInputs& in)
      : ops_(ops), num_ops_(num_ops), in_(in), kernels_(kernels()) {}

  Failure run_all() {
    int64_t macs = 0;
    for (int32_t i = 0; i < num_ops_; ++i) macs += macs_of(ops_[i]);
    threads_ = threads_for(macs);
    for (int32_t i = 0; i < num_ops_; ++i) {
      const Failure failure = prepare(i);
      if (failure.status != kOk) return failure;
    }
    shared_.reset(static_cast<uint8_t*>(
        ::operator new(static_cast<size_t>(shared_bytes_ + 64))));
    if (!run_phases(phases_, *this, threads_, scratch_bytes_, macs)) {
      return {kOutOfMemory, 0};
    }
    return {};
  }

  int64_t count(const Phase& phase) const override {
    if (phase.items >= 0) return phase.items;
    const ExpertsArgs& a = *static_cast<const ExpertsArgs*>(ops_[phase.op].args);
    return kernels_.experts(a.dtype)->num_items(a, phase.part, shared());
  }

  Stretch reads(const Phase& phase, int64_t begin, int64_t end) const override {
    const StepOp& op = ops_[phase.op];
    if (op.kind == kStepLikeliest && phase.part == kScreenBound) {
      const ScreenArgs& a = *static_cast<const ScreenArgs*>(op.args);
      return kernels_.screen(a.head.dtype)->reads(a, begin, end);
    }
    if (op.kind != kStepLinear) return {};
    const LinearArgs& a = *static_cast<const LinearArgs*>(op.args);
    return kernels_.linear(a.dtype)->reads(a, begin, end);
  }

  void run(const Phase& phase, int64_t begin, int64_t end, void* scratch) override {
    const StepOp& op = ops_[phase.op];
    switch (op.kind) {
      case kStepLinear: {
        const LinearArgs& a = *static_cast<const LinearArgs*>(op.args);
        return kernels_.linear(a.dtype)->run(a, begin, end, scratch);
      }
      case kStepAttend: return attend(op, phase, begin, end, scratch);
      case kStepHeadLinear: return run_heads(op, begin, end, scratch);
      case kStepLikeliest: {
        const ScreenArgs& a = *static_cast<const ScreenArgs*>(op.args);
        return kernels_.screen(a.head.dtype)->run(a, phase.part, begin, end, shared());
      }
      case kStepExperts: {
        const ExpertsArgs& a = *static_cast<const ExpertsArgs*>(op.args);
        return kernels_.experts(a.dtype)->run(a, phase.part, begin, end, shared(), scratch);
      }
      default: break;
    }
    const int64_t first = begin * phase.rows;
    run_rows(op, first, std::min(rows_of(op), end * phase.rows), scratch);
  }

 private:
  int64_t rows_of(const StepOp& op) const {
    switch (op.tokens) {
      case kAllTokens: return in_.num_tokens;
      case kWantedLogits: return in_.only_tokens ? 0 : in_.num_wanted;
      case kWantedTokens: return in_.only_tokens ? in_.num_wanted : 0;
      default: return in_.num_wanted;
    }
  }

  int64_t macs_of(const StepOp& op) const {
    if (op.kind == kStepExperts) {
      const ExpertsArgs& a = *static_cast<const ExpertsArgs*>(op.args);
      return rows_of(op) * op.heads * a.top_k * a.hidden * a.intermediate * 3;
    }
    const bool is_linear = op.kind == kStepLinear || op.kind == kStepHeadLinear;
    if (!is_linear && op.kind != kStepLikeliest) return 0;
    const LinearArgs& a = is_linear ? *static_cast<const LinearArgs*>(op.args)
                                    : static_cast<const ScreenArgs*>(op.args)->head;
    const int64_t heads = op.kind == kStepHeadLinear ? op.heads : 1;
    return heads * rows_of(op) * a.inputs * a.outputs;
  }

  void* shared() const {
    const auto address = reinterpret_cast<uintptr_t>(shared_.get());
    return reinterpret_cast<void*>((address + 63) / 64 * 64);
  }

  // --- before the step ------------------------------------------------------------

  Failure prepare(int32_t i) {
    const StepOp& op = ops_[i];
    switch (op.kind) {
      case kStepEmbed:
        for (int32_t t = 0; t < in_.num_tokens; ++t) {
          if (in_.token_ids[t] < 0 || in_.token_ids[t] >= op.limit) return {kBadToken, t};
        }
        add_rows_phase(i, op.size);
        return {};
      case kStepRotate:
      case kStepScale:
        if (op.limit != checked_positions_) {
          for (int32_t t = 0; t < in_.num_tokens; ++t) {
            if (in_.positions[t] < 0 || in_.positions[t] >= op.limit) {
              return {kBadPosition, t};
            }
          }
          checked_positions_ = op.limit;
        }
        add_rows_phase(i, static_cast<int64_t>(op.heads) * op.size);
        return {};
      case kStepLinear: return prepare_linear(i, 1);
      case kStepHeadLinear: return prepare_linear(i, ops_[i].heads);
      case kStepStore: return prepare_store(i);
      case kStepAttend: return prepare_attention(i);
      case kStepExperts: return prepare_experts(i);
      case kStepLikeliest: return prepare_screen(i);
      case kStepRoute: {
        const RouteArgs& a = *static_cast<const RouteArgs*>(op.args);
        need(4 * a.num_experts * static_cast<int64_t>(sizeof(float)));
        add_rows_phase(i, kStoreCost * a.num_experts);
        return {};
      }
      default:
        add_rows_phase(i, static_cast<int64_t>(op.heads) * op.size);
        return {};
    }
  }

  void need(int64_t scratch_bytes) {
    scratch_bytes_ = std::max(scratch_bytes_, scratch_bytes);
  }

  void add_phase(int32_t op, int64_t items, int32_t part = 0, int64_t rows = 1) {
    phases_.push_back({items, 1, rows, op, part});
  }

  // An operation whose rows cost as much as `elements` simple ones.
  void add_rows_phase(int32_t i, int64_t elements) {
    const int64_t rows = rows_of(ops_[i]);
    if (rows == 0) return;
    int64_t items = 1;
    if (threads_ > 1 && rows * elements > kSerialElements) {
      items = std::min(rows, threads_ * kItemsPerThread);
    }
    const int64_t each = (rows + items - 1) / items;
    add_phase(i, (rows + each - 1) / each, 0, each);
  }

  // One weight, or one for each head: these differ in addresses only.
  Failure prepare_linear(int32_t i, int32_t heads) {
    LinearArgs* const args = static_cast<LinearArgs*>(ops_[i].args);
    const LinearKernel* const kernel = kernels_.linear(args->dtype);
    if (kernel == nullptr) return {kUnsupported, i};
    for (int32_t head = 0; head < heads; ++head) {
      args[head].num_rows = static_cast<int32_t>(rows_of(ops_[i]));
    }
    if (args->num_rows == 0) return {};
    need(kernel->scratch_bytes(*args));
    add_phase(i, heads * kernel->num_items(*args));
    return {};
  }

  Failure prepare_store(int32_t i) {
    StoreArgs& a = *static_cast<StoreArgs*>(ops_[i].args);
    a.slot_mapping = in_.batches[ops_[i].group].slot_mapping;
    add_rows_phase(i, kStoreCost * a.pages.num_heads * (a.key.size + a.value.size));
    return {};
  }

  // query_start_loc of as many requests with one query.
  const int32_t* one_query_each(int32_t requests) {
    while (counted_.size() <= static_cast<size_t>(requests)) {
      counted_.push_back(static_cast<int32_t>(counted_.size()));
    }
    return counted_.data();
  }

  Failure prepare_attention(int32_t i) {
    AttentionArgs& a = *static_cast<AttentionArgs*>(ops_[i].args);
    const StepBatch& batch = in_.batches[ops_[i].group];
    const bool only_last = ops_[i].tokens != kAllTokens;
    const auto rows = static_cast<int32_t>(rows_of(ops_[i]));
    if (only_last && rows == 0) return {};
    if (only_last && rows != batch.num_requests) return {kBadQueryStartLoc, i};
    a.query_start_loc = only_last ? one_query_each(rows) : batch.query_start_loc;
    a.seq_lens = batch.seq_lens;
    a.block_table = batch.block_table;
    a.block_table_stride = batch.block_table_stride;
    a.block_table_width = batch.block_table_width;
    a.num_requests = batch.num_requests;
    a.num_tokens = rows;
    const AttentionKernel* const kernel =
        kernels_.attention(a.cell_format, a.query.dtype);
    if (kernel == nullptr) return {kUnsupported, i};
    size_t found = 0;
    while (found < plans_.size() && !plans_[found].fits(a, kernel)) ++found;
    if (found == plans_.size()) {
      const Checked checked = check(a);
      if (checked.status != kOk) return {checked.status, checked.request};
      plans_.push_back({&a, kernel, make_plan(a, *kernel, threads_)});
    }
    need(kernel->scratch_bytes(a));
    const auto part = static_cast<int32_t>(found);
    const Plan& plan = plans_[found].plan;
    add_phase(i, static_cast<int64_t>(plan.items.size()), 2 * part);
    if (!plan.merges.empty()) {
      add_phase(i, static_cast<int64_t>(plan.merges.size()), 2 * part + 1);
    }
    return {};
  }

  Failure prepare_experts(int32_t i) {
    ExpertsArgs& a = *static_cast<ExpertsArgs*>(ops_[i].args);
    const ExpertsKernel* const kernel = kernels_.experts(a.dtype);
    if (kernel == nullptr) return {kUnsupported, i};
    a.num_tokens = static_cast<int32_t>(rows_of(ops_[i])) * ops_[i].heads;
    if (a.num_tokens == 0) return {};
    shared_bytes_ = std::max(shared_bytes_, kernel->shared_bytes(a));
    need(kernel->scratch_bytes(a));
    for (int32_t part = 0; part < kernel->num_parts(a); ++part) add_phase(i, -1, part);
    return {};
  }

  Failure prepare_screen(int32_t i) {
    ScreenArgs& a = *static_cast<ScreenArgs*>(ops_[i].args);
    const ScreenKernel* const kernel = kernels_.screen(a.head.dtype);
    if (kernel == nullptr) return {kUnsupported, i};
    a.head.num_rows = static_cast<int32_t>(rows_of(ops_[i]));
    if (a.head.num_rows == 0) return {};
    shared_bytes_ = std::max(shared_bytes_, kernel->shared_bytes(a));
    for (int32_t part = 0; part < kScreenParts; ++part) {
      add_phase(i, kernel->num_items(a, part), part);
    }
    return {};
  }

  // --- during the step ------------------------------------------------------------

  void attend(const StepOp& op, const Phase& phase, int64_t begin, int64_t end,
              void* scratch) const {
    const AttentionArgs& a = *static_cast<const AttentionArgs*>(op.args);
    const AttentionPlan& shared = plans_[phase.part / 2];
    const Plan& plan = shared.plan;
    for (int64_t item = begin; item < end; ++item) {
      if (phase.part % 2 == 1) {
        shared.kernel->merge(a, plan.merges[item], scratch);
        continue;
      }
      const auto next = static_cast<size_t>(item) + 1;
      shared.kernel->attend(a, plan.items[item],
                            next < plan.items.size() ? &plan.items[next] : nullptr,
                            scratch);
    }
  }

  // Items of a head follow each other.
  void run_heads(const StepOp& op, int64_t begin, int64_t end, void* scratch) const {
    const LinearArgs* const args = static_cast<const LinearArgs*>(op.args);
    const LinearKernel* const kernel = kernels_.linear(args->dtype);
    const int64_t each = kernel->num_items(*args);
    while (begin < end) {
      const int64_t head = begin / each;
      const int64_t last = std::min(end, (head + 1) * each);
      kernel->run(args[head], begin - head * each, last - head * each, scratch);
      begin = last;
    }
  }

  void run_rows(const StepOp& op, int64_t begin, int64_t end, void* scratch) const {
    if (begin >= end) return;
    if (op.kind == kStepStore) {
      StoreArgs a = *static_cast<const StoreArgs*>(op.args);
      a.key.data = row_of(a.key, begin);
      a.value.data = row_of(a.value, begin);
      a.slot_mapping += begin;
      a.num_tokens = static_cast<int32_t>(end - begin);
      kernels_.store(a);
    } else if (op.kind == kStepRoute) {
      const RouteArgs& a = *static_cast<const RouteArgs*>(op.args);
      const int64_t row_bytes = op.x.stride * dtype_bytes(op.dtype);
      for (int64_t row = begin; row < end; ++row) {
        route_row(a, static_cast<const uint8_t*>(op.x.data) + row * row_bytes, op.dtype,
                  row, static_cast<float*>(scratch));
      }
    } else if (op.kind == kStepEmbed && op.args != nullptr) {
      LinearArgs a = *static_cast<const LinearArgs*>(op.args);
      a.out = static_cast<uint8_t*>(a.out) + begin * a.out_stride * dtype_bytes(a.dtype);
      a.num_rows = static_cast<int32_t>(end - begin);
      kernels_.linear(a.dtype)->gather(a, in_.token_ids + begin, op.scale);
    } else if (op.kind >= kStepHeadLinear) {
      kernels_.head_rows(op, in_, begin, end);
    } else {
      kernels_.step_rows(op, in_, begin, end);
    }
  }

  static void* row_of(const Rows& rows, int64_t row) {
    return static_cast<uint8_t*>(rows.data) +
           row * rows.token_stride * dtype_bytes(rows.dtype);
  }

  const StepOp* const ops_;
  const int32_t num_ops_;
  const StepInputs& in_;
  const KernelTable& kernels_;
  int threads_ = 1;
  int64_t checked_positions_ = -1;
  int64_t scratch_bytes_ = 64;
  int64_t shared_bytes_ = 0;
  std::vector<Phase> phases_;
  std::vector<AttentionPlan> plans_;
  std::vector<int32_t> counted_;  // 0, 1, 2, … once it is asked for
  std::unique_ptr<uint8_t> shared_;
};

}  // namespace

int64_t run_step(const StepOp* ops, int32_t num_ops, const StepInputs& in) {
  try {
    const Failure failure = StepRunner(ops, num_ops, in).run_all();
    return static_cast<int64_t>(failure.where) << 8 | failure.status;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

}  // namespace vllm_cpu

using namespace vllm_cpu;

// Sizes of the structs of step.h, 12 bits each, and the number of kinds, so that other
// sources are noticed.
VLLM_EXPORT int64_t vllm_cpu_step_abi() {
  const size_t sizes[] = {sizeof(StepOp), sizeof(RouteArgs), sizeof(StepBatch),
                          sizeof(StepInputs), kStepKinds};
  int64_t abi = 0;
  for (int i = 0; i < 5; ++i) abi |= static_cast<int64_t>(sizes[i]) << 12 * i;
  return abi;
}

VLLM_EXPORT int64_t vllm_cpu_step(const StepOp* ops, int32_t num_ops,
                                  const StepInputs* inputs) {
  return run_step(ops, num_ops, *inputs);
}
