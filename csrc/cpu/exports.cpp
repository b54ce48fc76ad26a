// The functions that leave the library, and the choice of instruction set.
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <new>

#include "plan.h"
#include "runtime.h"

namespace vllm_cpu {

namespace generic {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif

namespace {

constexpr int64_t kSerialCycles = 1 << 16;  // below this, waking threads costs more
constexpr int64_t kHugePage = 2 << 20;

const KernelTable* table_of(const char* isa) {
  if (strcmp(isa, "generic") == 0) return &generic::kTable;
#if defined(__x86_64__)
  // These ask the operating system, too, whether it saves the registers.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512bf16");
  if (has_avx2 && strcmp(isa, "avx2") == 0) return &avx2::kTable;
  if (has_avx512 && strcmp(isa, "avx512") == 0) return &avx512::kTable;
#endif
  return nullptr;
}

const KernelTable* g_table = nullptr;

// Grows with the largest call of its thread and lives as long as the thread.
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;

  bool reserve(int64_t wanted) {
    if (wanted <= bytes) return true;
    free(data);
    bytes = 0;
    data = aligned_alloc(64, static_cast<size_t>((wanted + 63) / 64 * 64));
    if (data != nullptr) bytes = wanted;
    return data != nullptr;
  }
  ~Scratch() { free(data); }
};

thread_local Scratch t_scratch;

Status run(const AttentionArgs& args, const AttentionKernel& kernel) {
  // A team of fewer threads than the last would make the runtime rebuild its pool:
  // one or all.
  const bool alone = omp_in_parallel() || estimated_cycles(args) < kSerialCycles;
  const int max_threads = alone ? 1 : omp_get_max_threads();
  const Plan plan = make_plan(args, kernel, max_threads);
  const auto num_items = static_cast<int64_t>(plan.items.size());
  const auto num_merges = static_cast<int64_t>(plan.merges.size());
  const bool parallel = max_threads > 1 && num_items > 1;
  const int64_t scratch_bytes = kernel.scratch_bytes(args);
  bool failed = false;
#pragma omp parallel if (parallel) reduction(|| : failed)
  {
    failed = !t_scratch.reserve(scratch_bytes);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items; ++i) {
      const int64_t next = i + (parallel ? max_threads : 1);
      if (!failed) {
        kernel.attend(args, plan.items[i],
                      next < num_items ? &plan.items[next] : nullptr, t_scratch.data);
      }
    }
    if (num_merges > 0) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_merges; ++i) {
        if (!failed) kernel.merge(args, plan.merges[i], t_scratch.data);
      }
    }
  }
  return failed ? kOutOfMemory : kOk;
}

int64_t encode(Status status, int32_t request) {
  return (static_cast<int64_t>(request) << 8) | status;
}

}  // namespace

const KernelTable& kernels() { return *g_table; }

void* thread_scratch(int64_t bytes) {
  return t_scratch.reserve(bytes) ? t_scratch.data : nullptr;
}

}  // namespace vllm_cpu

using namespace vllm_cpu;

// Chooses "avx512", "avx2", "generic" or (null) the best there is. Returns the name of
// the choice; null, and no change, where this machine cannot run it.
VLLM_EXPORT const char* vllm_cpu_choose_isa(const char* isa) {
  static const char* const kBestFirst[] = {"avx512", "avx2", "generic"};
  const KernelTable* chosen = isa == nullptr ? nullptr : table_of(isa);
  if (isa == nullptr) {
    for (const char* name : kBestFirst) {
      if (chosen == nullptr) chosen = table_of(name);
    }
  }
  if (chosen == nullptr) return nullptr;
  g_table = chosen;
  return chosen->isa;
}

// Sizes of the structs, so that a caller built from other sources notices.
VLLM_EXPORT int64_t vllm_cpu_abi() {
  return static_cast<int64_t>(sizeof(AttentionArgs)) << 32 | sizeof(StoreArgs);
}

// 0, or a Status in the low 8 bits and the request at fault above them.
VLLM_EXPORT int64_t vllm_cpu_paged_attention(const AttentionArgs* args) {
  const AttentionKernel* const kernel =
      g_table->attention(args->cell_format, args->query.dtype);
  if (kernel == nullptr) return encode(kUnsupported, 0);
  const Checked checked = check(*args);
  if (checked.status != kOk) return encode(checked.status, checked.request);
  try {
    return encode(run(*args, *kernel), 0);
  } catch (const std::bad_alloc&) {
    return encode(kOutOfMemory, 0);
  }
}

VLLM_EXPORT int64_t vllm_cpu_store(const StoreArgs* args) {
  return g_table->store(*args);
}

// Reads every byte once and returns a checksum: the machine's read bandwidth.
VLLM_EXPORT double vllm_cpu_read(const void* data, int64_t num_bytes) {
  return g_table->read(data, num_bytes);
}

// Asks for huge pages under the whole ones of [data, data + num_bytes). 0: granted.
VLLM_EXPORT int32_t vllm_cpu_advise_huge_pages(void* data, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + num_bytes) / kHugePage * kHugePage;
  if (end <= begin) return 1;
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0 ? 0 : 1;
#else
  static_cast<void>(data);
  static_cast<void>(num_bytes);
  return 1;
#endif
}
