// Attention over dense cells: K[0..head_size) then V[0..head_size_v) of one float type.
#include "../kv_formats.h"
#include "attention_tile.h"
#include "kernels.h"

namespace vllm_cpu::VLLM_ISA {

template <class Format, int kDType>
struct DenseCells : PlainCells<Float32Units> {
  static constexpr int kBytes = dtype_bytes(kDType);
  static constexpr int kRegisterBytes = kLanes * kBytes;
  static constexpr int kValueGroupBytes = kRegisterBytes;
  static constexpr int kFewRows = 4;

  explicit DenseCells(const AttentionArgs& a)
      : PlainCells(a, Format{a.query.size, a.out.size}.state_bytes()),
        value_offset(Format{a.query.size, a.out.size}.v_offset()) {}

  U load_key(const uint8_t* cell, int elem, int count) const {
    return as_units(load_as_float<kDType>(cell + elem * kBytes, count));
  }
  void load_values(NoTables, const uint8_t* const* cells, int elem, int count,
                   U (&r)[1][1]) const {
    r[0][0] = load_key(cells[0] + value_offset, elem, count);
  }

  int64_t value_offset;
};

using Float32 = DenseCells<kv_formats::float32, kFloat32>;
using Float16 = DenseCells<kv_formats::float16, kFloat16>;
using BFloat16 = DenseCells<kv_formats::bfloat16, kBFloat16>;

#if defined(__AVX512BF16__)
struct BFloat16Pairs : PlainCells<BFloat16Units> {
  using Format = kv_formats::bfloat16;
  static constexpr int kBytes = 2;
  static constexpr int kRegisterBytes = kLanes * 4;
  static constexpr int kValueGroupBytes = 2 * kRegisterBytes;

  explicit BFloat16Pairs(const AttentionArgs& a)
      : PlainCells(a, Format{a.query.size, a.out.size}.state_bytes()),
        value_offset(Format{a.query.size, a.out.size}.v_offset()) {}

  U load_key(const uint8_t* cell, int elem, int count) const {
    return load_pairs(cell + elem * kBytes, count);
  }
  void load_values(NoTables, const uint8_t* const* cells, int elem, int count,
                   U (&r)[1][2]) const {
    r[0][0] = load_key(cells[0] + value_offset, elem, count);
    r[0][1] = load_key(cells[1] + value_offset, elem, count);
    Units::interleave(r[0]);
  }

  int64_t value_offset;
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
