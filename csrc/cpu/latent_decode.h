// What the translation unit of a latent format gives: a cell as a row of numbers.
#pragma once

#include "narrow.h"
#include "work.h"

namespace vllm_cpu::VLLM_ISA {

struct DecodeArgs {
  int size;       // elements of a latent with its rotary part, a multiple of 32
  float scale;    // per tensor
};

// Writes `size` elements of `cell` to `row`: float32, or bfloat16 rounded to nearest.
using DecodeCell = void (*)(const DecodeArgs&, const uint8_t* cell, void* row);

// The decoder of one format, and the bytes of its cell.
struct LatentFormat {
  DecodeCell to_float32;
  DecodeCell to_bfloat16;
  int64_t (*cell_bytes)(int size);
};

template <int kDType>
VLLM_INLINE void put(void* row, int elem, F x) {
  store_from_float<kDType>(static_cast<uint8_t*>(row) + elem * dtype_bytes(kDType), x);
}

const LatentFormat* fp8_latent(int32_t cell_format);
const LatentFormat* per_token_head_latent(int32_t cell_format);
const LatentFormat* ds_mla_latent(int32_t cell_format);

}  // namespace vllm_cpu::VLLM_ISA
