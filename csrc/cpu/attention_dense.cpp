// Attention over dense cells: K[0..head_size) then V[0..head_size_v) of one float type.
#include "../kv_formats.h"
#include "attention_tile.h"
#include "kernels.h"

namespace vllm_cpu::VLLM_ISA {

template <class Format, int kDType>
struct DenseCells {
  using Units = Float32Units;
  static constexpr bool kStateScales = false;
  static constexpr bool kDecoded = false;
  static constexpr int kBytes = dtype_bytes(kDType);
  static constexpr int kRegisterBytes = kLanes * kBytes;

  explicit DenseCells(const AttentionArgs& a) {
    const Format format{a.query.size, a.out.size};
    value_offset = static_cast<int>(format.v_offset());
    cell_bytes = static_cast<int>(format.state_bytes());
  }

  U load_key(const uint8_t* cell, int elem, int count) const {
    return as_units(load_as_float<kDType>(cell + elem * kBytes, count));
  }
  U load_value(const uint8_t* cell, int elem, int count) const {
    return load_key(cell + value_offset, elem, count);
  }

  int value_offset;
  int cell_bytes;
};

using Float32 = DenseCells<kv_formats::float32, kFloat32>;
using Float16 = DenseCells<kv_formats::float16, kFloat16>;
using BFloat16 = DenseCells<kv_formats::bfloat16, kBFloat16>;

#if defined(__AVX512BF16__)
struct BFloat16Pairs : BFloat16 {
  using Units = BFloat16Units;
  using BFloat16::DenseCells;
  static constexpr int kRegisterBytes = kLanes * 4;

  U load_key(const uint8_t* cell, int elem, int count) const {
    return load_pairs(cell + elem * kBytes, count);
  }
  U load_value(const uint8_t* cell, int elem, int count) const {
    return load_key(cell + value_offset, elem, count);
  }
};
#endif

const AttentionKernel* dense_attention(int32_t cell_format, int32_t query_dtype) {
  static constexpr AttentionKernel float32 = TileAttention<Float32>::kernel();
  static constexpr AttentionKernel float16 = TileAttention<Float16>::kernel();
  static constexpr AttentionKernel bfloat16 = TileAttention<BFloat16>::kernel();
#if defined(__AVX512BF16__)
  static constexpr AttentionKernel pairs = TileAttention<BFloat16Pairs>::kernel();
  if (cell_format == kCellsBFloat16 && query_dtype == kBFloat16) return &pairs;
#else
  static_cast<void>(query_dtype);
#endif
  switch (cell_format) {
    case kCellsFloat32: return &float32;
    case kCellsFloat16: return &float16;
    case kCellsBFloat16: return &bfloat16;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
