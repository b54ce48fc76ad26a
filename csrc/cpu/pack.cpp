// Brings weights into panels, and back. Knows units of 32 bits, not what they hold.
#include <string.h>

#include <vector>

#include "linear.h"
#include "runtime.h"

namespace vllm_cpu {
namespace {

// Columns of a row that are moved at a time: what is read stays in the first-level cache.
constexpr int64_t kSteps = 64;

struct PackArgs {
  uint8_t* panels;
  uint8_t* rows;
  int64_t row_bytes;    // from row to row
  int64_t width_bytes;  // of a row, at most 4 * steps
  int64_t outputs;
  int64_t steps;
};

// Steps [begin, end) of one panel, to the panels or (`back`) to its rows.
void move_part(const PackArgs& a, int64_t panel, uint8_t* rows, int64_t begin,
               int64_t end, bool back) {
  uint8_t* const units = a.panels + panel * a.steps * kPanel * 4;
  for (int64_t i = 0; i < kPanel; ++i) {
    const int64_t output = panel * kPanel + i;
    uint8_t* const row = rows + i * a.row_bytes;
    for (int64_t step = begin; step < end; ++step) {
      const int64_t left = output < a.outputs ? a.width_bytes - step * 4 : 0;
      const size_t count = left >= 4 ? 4 : left > 0 ? static_cast<size_t>(left) : 0;
      uint8_t* const unit = units + (step * kPanel + i) * 4;
      if (back) {
        memcpy(row + step * 4, unit, count);
      } else if (count == 4) {
        memcpy(unit, row + step * 4, 4);
      } else {
        memset(unit, 0, 4);
        memcpy(unit, row + step * 4, count);
      }
    }
  }
}

}  // namespace
}  // namespace vllm_cpu

using namespace vllm_cpu;

// Between `rows` [outputs, inputs], `row_bytes` apart and `width_bytes` wide, and
// `panels` [panels, steps, kPanel] of 32-bit units: to the panels, or `back`. Whole
// panels of whole units side by side may become panels where they lie: then both are the
// same memory. 0.
VLLM_EXPORT int64_t vllm_cpu_pack(void* panels, void* rows, int64_t row_bytes,
                               int64_t width_bytes, int64_t outputs, int32_t back) {
  const PackArgs args = {static_cast<uint8_t*>(panels),
                         static_cast<uint8_t*>(rows),
                         row_bytes,
                         width_bytes,
                         outputs,
                         (width_bytes + 3) / 4};
  const int64_t num_panels = (outputs + kPanel - 1) / kPanel;
  const int64_t panel_bytes = kPanel * row_bytes;
#pragma omp parallel if (outputs * width_bytes > 1 << 18)
  {
    std::vector<uint8_t> copy(panels == rows ? panel_bytes : 0);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      uint8_t* from = args.rows + panel * panel_bytes;
      if (!copy.empty()) from = static_cast<uint8_t*>(memcpy(copy.data(), from, panel_bytes));
      for (int64_t begin = 0; begin < args.steps; begin += kSteps) {
        const int64_t end = begin + kSteps < args.steps ? begin + kSteps : args.steps;
        move_part(args, panel, from, begin, end, back != 0);
      }
    }
  }
  return 0;
}
