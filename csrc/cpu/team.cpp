#include "team.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>

#include "runtime.h"

namespace vllm_cpu {
namespace {

constexpr int kSpins = 4000;               // about 50 microseconds
constexpr int64_t kSerialMacs = 1 << 18;   // below this, waking threads costs more

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Begin in the high half, end in the low one.
struct alignas(64) Span {
  std::atomic<uint64_t> both{0};

  void set(uint64_t begin, uint64_t end) {
    both.store(begin << 32 | end, std::memory_order_relaxed);
  }
  bool take(int64_t count, bool from_end, int64_t* first, int64_t* last) {
    uint64_t now = both.load(std::memory_order_relaxed);
    for (;;) {
      const auto begin = static_cast<int64_t>(now >> 32);
      const auto end = static_cast<int64_t>(now & 0xffffffffu);
      if (begin >= end) return false;
      const int64_t taken = std::min(count, end - begin);
      *first = from_end ? end - taken : begin;
      *last = *first + taken;
      const int64_t low = from_end ? begin : *last;
      const int64_t high = from_end ? *first : end;
      const uint64_t left = static_cast<uint64_t>(low) << 32 | static_cast<uint64_t>(high);
      if (both.compare_exchange_weak(now, left, std::memory_order_relaxed)) return true;
    }
  }
};

class Team {
 public:
  Team(const std::vector<Phase>& phases, PhaseRunner& runner, int most)
      : phases_(phases), runner_(runner), spans_(most) {}

  // One thread of `size`; without scratch nothing is done by anybody.
  void work(int thread, int size, void* scratch) {
    if (scratch == nullptr) failed_.store(true, std::memory_order_relaxed);
    meet(size, scratch, 0);
    for (;;) {
      const size_t now = current_;
      if (now >= phases_.size()) return;
      const Phase& phase = phases_[now];
      for (int i = 0; i < size; ++i) {
        Span& span = spans_[(thread + i) % size];
        int64_t begin, end;
        while (span.take(phase.grain, i > 0, &begin, &end)) {
          runner_.run(phase, begin, end, scratch);
        }
      }
      meet(size, scratch, now + 1);
    }
  }

  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  // Waits for all; the last one prepares phase `next`.
  void meet(int size, void* scratch, size_t next) {
    const int64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      prepare(size, scratch, next);
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
      if (++spins < kSpins) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

  void prepare(int size, void* scratch, size_t next) {
    if (failed()) next = phases_.size();
    int64_t items = 0;
    for (; next < phases_.size(); ++next) {
      items = runner_.count(phases_[next]);
      if (items > 1) break;
      runner_.run(phases_[next], 0, items, scratch);
    }
    current_ = next;
    if (next == phases_.size()) return;
    for (int i = 0; i < size; ++i) {
      spans_[i].set(items * i / size, items * (i + 1) / size);
    }
  }

  const std::vector<Phase>& phases_;
  PhaseRunner& runner_;
  std::vector<Span> spans_;
  size_t current_ = 0;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
  std::atomic<bool> failed_{false};
};

}  // namespace

int threads_for(int64_t macs) {
  // A team of fewer threads than the last would make the runtime rebuild its pool: one
  // or all.
  return omp_in_parallel() || macs < kSerialMacs ? 1 : omp_get_max_threads();
}

bool run_phases(const std::vector<Phase>& phases, PhaseRunner& runner, int num_threads,
                int64_t scratch_bytes) {
  if (num_threads <= 1) {
    void* const scratch = thread_scratch(scratch_bytes);
    if (scratch == nullptr) return false;
    for (const Phase& phase : phases) runner.run(phase, 0, runner.count(phase), scratch);
    return true;
  }
  Team team(phases, runner, num_threads);
#pragma omp parallel num_threads(num_threads)
  // The runtime may give fewer threads than asked for.
  team.work(omp_get_thread_num(), omp_get_num_threads(), thread_scratch(scratch_bytes));
  return !team.failed();
}

}  // namespace vllm_cpu
