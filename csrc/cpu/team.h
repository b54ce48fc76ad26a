// A team of threads that goes through a list of phases inside one parallel region.
//
// A phase is a number of items in any order; all of them are done before the next phase
// begins. Each thread has a run of neighbouring items, so that it reads memory in order,
// and who has none left takes from the end of another's: a thread that shares its core
// with another program holds up nobody for long. Phases of one item are done by whoever
// arrives last, before the others go on. Waiting threads bring to their caches what they
// will read next, spin briefly, then yield. Where they wait for much of the time, since
// another program uses their cores, work of that size is done by one thread for a while.
#pragma once

#include <stdint.h>

#include <atomic>
#include <vector>

namespace vllm_cpu {

struct Phase {
  int64_t items;      // -1: known once the phases before are done
  int64_t grain;      // items that are taken at once
  int64_t rows;       // of an item, where they are counted
  int32_t op;
  int32_t part;       // of the op
};

// Bytes that lie one after another.
struct Stretch {
  const uint8_t* data;
  int64_t bytes;
};

class PhaseRunner {
 public:
  virtual ~PhaseRunner() = default;
  virtual int64_t count(const Phase& phase) const = 0;  // of its items
  // What items from `begin` on read in order, where nothing before the phase writes it;
  // else no bytes.
  virtual Stretch reads(const Phase& phase, int64_t begin, int64_t end) const = 0;
  // Does items [begin, end) of a phase, on any thread.
  virtual void run(const Phase& phase, int64_t begin, int64_t end, void* scratch) = 0;
};

// Runs every phase, of `macs` multiplications together, on at most `num_threads` threads
// with `scratch_bytes` each. False, and nothing done, where there is no memory.
bool run_phases(const std::vector<Phase>& phases, PhaseRunner& runner, int num_threads,
                int64_t scratch_bytes, int64_t macs);

// Threads for work of so many multiplications: one, or all there are.
int threads_for(int64_t macs);

}  // namespace vllm_cpu
