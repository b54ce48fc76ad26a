// Writes one dense state per (token, head): K then V, converted to the cache's type, as
// a cell or, of bfloat16, into a tile.
// Values past its finite range saturate, NaN is kept; equal types are copied bit by bit.
#include <string.h>

#include "../kv_formats.h"
#include "kernels.h"
#include "turns.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

constexpr int kMaxRecord = 4096;                // bytes of a state in tiles
constexpr int64_t kParallelBytes = 1 << 16;  // below this, waking threads costs more

constexpr float largest(int dtype) {
  return dtype == kFloat16 ? 65504.f : dtype == kBFloat16 ? 0x1.fep127f : 0x1.fffffep127f;
}

template <int kFrom, int kTo>
void convert(uint8_t* to, const uint8_t* from, int64_t count) {
  if constexpr (kFrom == kTo) {
    memcpy(to, from, count * dtype_bytes(kTo));
  } else {
    for (int64_t i = 0; i < count; i += kLanes) {
      const int left = static_cast<int>(smaller(count - i, kLanes));
      F x = load_as_float<kFrom>(from + i * dtype_bytes(kFrom), left);
      if constexpr (largest(kFrom) > largest(kTo)) {
        x = max(set1(-largest(kTo)), min(set1(largest(kTo)), x));
      }
      store_from_float<kTo>(to + i * dtype_bytes(kTo), x, left);
    }
  }
}

template <int kFrom, int kTo>
void store_side(uint8_t* cell, const Rows& rows, int64_t token, int64_t head) {
  const int64_t from = token * rows.token_stride + head * rows.head_stride;
  convert<kFrom, kTo>(
      cell, static_cast<const uint8_t*>(rows.data) + from * dtype_bytes(kFrom),
      rows.size);
}

template <int kFrom, int kTo>
int32_t store_all(const StoreArgs& a) {
  const Pages& pages = a.pages;
  const int64_t num_slots = pages.num_blocks * pages.block_size;
  const int64_t key_bytes = static_cast<int64_t>(a.key.size) * dtype_bytes(kTo);
  const int64_t cell_bytes = key_bytes + a.value.size * dtype_bytes(kTo);
  const bool parallel = a.num_tokens * pages.num_heads * cell_bytes > kParallelBytes;
  const bool tiled = (a.cell_format & kTiled) != 0;
  const kv_formats::bfloat16_tile16 f{a.key.size, a.value.size};
  const TurnsOf turns{2, {VLLM_TURNS(f, k, 0), VLLM_TURNS(f, v, 0)}};
  if (tiled && (kTo != kBFloat16 || cell_bytes > kMaxRecord)) return kUnsupported;
#pragma omp parallel for schedule(static) if (parallel)
  for (int32_t token = 0; token < a.num_tokens; ++token) {
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0 || slot >= num_slots) continue;
    uint8_t* const page = pages.data + slot / pages.block_size * pages.block_stride;
    uint8_t* const state = page + slot % pages.block_size * pages.state_stride;
    for (int32_t head = 0; head < pages.num_heads; ++head) {
      if (tiled) {
        alignas(64) uint8_t record[kMaxRecord];
        store_side<kFrom, kTo>(record, a.key, token, head);
        store_side<kFrom, kTo>(record + key_bytes, a.value, token, head);
        deal_record(pages, page, head, slot % pages.block_size, record, turns);
        continue;
      }
      uint8_t* const cell = state + head * pages.head_stride;
      store_side<kFrom, kTo>(cell, a.key, token, head);
      store_side<kFrom, kTo>(cell + key_bytes, a.value, token, head);
    }
  }
  return kOk;
}

template <int kFrom>
int32_t store_from(const StoreArgs& a) {
  switch (a.cell_format & ~kTiled) {
    case kCellsFloat32: return store_all<kFrom, kFloat32>(a);
    case kCellsFloat16: return store_all<kFrom, kFloat16>(a);
    case kCellsBFloat16: return store_all<kFrom, kBFloat16>(a);
    default: return kUnsupported;
  }
}

}  // namespace

int32_t store_cells(const StoreArgs& a) {
  switch (a.key.dtype) {
    case kFloat32: return store_from<kFloat32>(a);
    case kFloat16: return store_from<kFloat16>(a);
    case kBFloat16: return store_from<kBFloat16>(a);
    default: return kUnsupported;
  }
}

double read_bytes(const void* data, int64_t num_bytes) {
  const float* const p = static_cast<const float*>(data);
  const int64_t count = num_bytes / 4 / (4 * kLanes) * (4 * kLanes);
  double total = 0;
#pragma omp parallel reduction(+ : total)
  {
    F sums[4] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i += 4 * kLanes) {
      for (int j = 0; j < 4; ++j) sums[j] = max(sums[j], load(p + i + j * kLanes));
    }
    total += reduce_max(max(max(sums[0], sums[1]), max(sums[2], sums[3])));
  }
  return total;
}

}  // namespace vllm_cpu::VLLM_ISA
