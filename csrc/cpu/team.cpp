#include "team.h"

#include <omp.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>

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

// Asks for what a thread will read next, while it waits. A thread looks ahead no further
// than a quarter of its second-level cache, and comes back to a stretch where it left it.
class Ahead {
 public:
  void aim(const std::vector<Phase>& phases, const PhaseRunner& runner, size_t next,
           int thread, int size) {
    if (next <= phase_) return;
    for (size_t i = next; i < phases.size(); ++i) {
      const int64_t items = phases[i].items;
      if (items <= 1) continue;
      const Stretch stretch = runner.reads(phases[i], items * thread / size,
                                           items * (thread + 1) / size);
      if (stretch.bytes == 0) continue;
      phase_ = i;
      line_ = stretch.data;
      end_ = line_ + std::min(stretch.bytes, kBytesAhead);
      return;
    }
    phase_ = phases.size();
    line_ = end_;
  }

  // False where everything has been asked for.
  bool fetch() {
    for (int i = 0; i < kLinesAtOnce; ++i, line_ += 64) {
      if (line_ >= end_) return false;
      __builtin_prefetch(line_, 0, 2);
    }
    return true;
  }

 private:
  static constexpr int64_t kBytesAhead = 256 << 10;
  static constexpr int kLinesAtOnce = 8;

  size_t phase_ = 0;
  const uint8_t* line_ = nullptr;
  const uint8_t* end_ = nullptr;
};

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Of all threads of the process.
int64_t cpu_ns() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

// Whether a team pays. A thread whose core another program has holds up the others at
// the end of every phase. Where threads wait because work cannot be shared evenly, all
// of them have their cores, and a team pays.
class Crowding {
 public:
  bool leaves_room_for(int64_t macs) {
    if (alone_left_ == 0 || macs > limit_) return true;
    --alone_left_;
    return false;
  }

  // What a team waited, all threads together, beyond spinning, and for how long threads
  // had no core.
  void note(int64_t macs, int64_t waited_ns, int64_t lost_ns, int64_t passed_ns) {
    if (waited_ns * 4 < passed_ns || lost_ns * 8 < passed_ns) {
      if (macs <= limit_) *this = {};
      return;
    }
    if (++times_ < kTimes) return;
    limit_ = 4 * macs;
    alone_left_ = rest_;
    rest_ = std::min(2 * rest_, kLongestRest);
  }

 private:
  static constexpr int kTimes = 2;  // in a row
  static constexpr int64_t kFirstRest = 8, kLongestRest = 256;  // runs of phases

  int times_ = 0;
  int64_t limit_ = INT64_MAX;
  int64_t alone_left_ = 0;
  int64_t rest_ = kFirstRest;
};

class Team {
 public:
  Team(const std::vector<Phase>& phases, PhaseRunner& runner, int most)
      : phases_(phases), runner_(runner), spans_(most) {}

  // One thread of `size`; without scratch nothing is done by anybody.
  void work(int thread, int size, void* scratch) {
    if (scratch == nullptr) failed_.store(true, std::memory_order_relaxed);
    Ahead ahead;
    meet(thread, size, scratch, 0, ahead);
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
      meet(thread, size, scratch, now + 1, ahead);
    }
  }

  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  int64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

 private:
  // Waits for all; the last one prepares phase `next`.
  void meet(int thread, int size, void* scratch, size_t next, Ahead& ahead) {
    const int64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      prepare(size, scratch, next);
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    ahead.aim(phases_, runner_, next, thread, size);
    for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
      if (ahead.fetch()) continue;
      if (++spins == kSpins) return wait_long(round);
      pause();
    }
  }

  void wait_long(int64_t round) {
    const int64_t began = now_ns();
    while (round_.load(std::memory_order_acquire) == round) sched_yield();
    waited_ns_.fetch_add(now_ns() - began, std::memory_order_relaxed);
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
  std::atomic<int64_t> waited_ns_{0};
  std::atomic<bool> failed_{false};
};

}  // namespace

int threads_for(int64_t macs) {
  // A team of fewer threads than the last would make the runtime rebuild its pool: one
  // or all.
  return omp_in_parallel() || macs < kSerialMacs ? 1 : omp_get_max_threads();
}

bool run_phases(const std::vector<Phase>& phases, PhaseRunner& runner, int num_threads,
                int64_t scratch_bytes, int64_t macs) {
  static thread_local Crowding crowding;
  if (num_threads <= 1 || !crowding.leaves_room_for(macs)) {
    void* const scratch = thread_scratch(scratch_bytes);
    if (scratch == nullptr) return false;
    for (const Phase& phase : phases) runner.run(phase, 0, runner.count(phase), scratch);
    return true;
  }
  Team team(phases, runner, num_threads);
  const int64_t began = now_ns(), cpu_began = cpu_ns();
#pragma omp parallel num_threads(num_threads)
  // The runtime may give fewer threads than asked for.
  team.work(omp_get_thread_num(), omp_get_num_threads(), thread_scratch(scratch_bytes));
  const int64_t passed = now_ns() - began;
  const int64_t lost = num_threads * passed - (cpu_ns() - cpu_began);
  crowding.note(macs, team.waited_ns(), lost, passed);
  return !team.failed();
}

}  // namespace vllm_cpu
