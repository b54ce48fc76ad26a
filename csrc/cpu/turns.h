// Writes a state's record into a tile in which 16 states take turns.
#pragma once

#include <string.h>

#include "api.h"
#include "simd.h"

namespace vllm_cpu::VLLM_ISA {

// A field: its first byte in a record of its side and its bytes (padding included), the
// states that take turns in it and the bytes of a turn.
struct Turns {
  int64_t region;
  int64_t bytes;
  int64_t states;
  int64_t unit;
  int side;
};

#define VLLM_TURNS(format, field, side)                               \
  Turns {                                                             \
    format.field##_region(), format.field##_stride(),                 \
        format.field##_interleave(), format.field##_unit(), side      \
  }

constexpr int kMaxFields = 5;

// All fields of a format; `count` of them.
struct TurnsOf {
  int count;
  Turns fields[kMaxFields];
};

template <int kUnit>
VLLM_INLINE void deal(uint8_t* to, const uint8_t* from, int64_t units, int64_t stride) {
  for (int64_t i = 0; i < units; ++i) memcpy(to + i * stride, from + i * kUnit, kUnit);
}

// `tile` of the field's side, of state `turn` of 16; `record` of the side.
static inline void write_turns(uint8_t* tile, int turn, const uint8_t* record,
                               const Turns& f) {
  const int64_t lane = turn % f.states;
  const int64_t stride = f.states * f.unit;
  const int64_t units = f.bytes / f.unit;
  const int64_t rest = f.bytes % f.unit;
  uint8_t* const group = tile + 16 * f.region + (turn - lane) * f.bytes;
  const uint8_t* const from = record + f.region;
  switch (f.unit) {
    case 1: deal<1>(group + lane, from, units, stride); break;
    case 2: deal<2>(group + lane * 2, from, units, stride); break;
    case 3: deal<3>(group + lane * 3, from, units, stride); break;
    default: deal<4>(group + lane * 4, from, units, stride); break;
  }
  memcpy(group + units * stride + lane * rest, from + units * f.unit,
         static_cast<size_t>(rest));
}

// A whole record: the sides' bytes one after another. pages.num_heads counts KV heads.
static inline void deal_record(const Pages& pages, uint8_t* page, int64_t head,
                               int64_t in_block, const uint8_t* record,
                               const TurnsOf& turns) {
  uint8_t* const tile = page + in_block / 16 * 16 * pages.state_stride;
  for (int i = 0; i < turns.count; ++i) {
    const Turns& f = turns.fields[i];
    const int64_t slot = f.side * static_cast<int64_t>(pages.num_heads) + head;
    write_turns(tile + slot * pages.head_stride, static_cast<int>(in_block % 16),
                record + f.side * pages.state_stride, f);
  }
}

}  // namespace vllm_cpu::VLLM_ISA
