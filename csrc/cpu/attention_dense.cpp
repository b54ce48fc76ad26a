// Attention over dense cells, K[0..head_size) then V[0..head_size_v) of one float type,
// and over tiles of bfloat16.
#include "../kv_formats.h"
#include "attention_tile.h"
#include "kernels.h"
#include "pairs.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

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
  void load_values(const uint8_t* const* cells, int elem, int count,
                   U (&r)[1][1]) const {
    r[0][0] = load_key(cells[0] + value_offset, elem, count);
  }

  int64_t value_offset;
};

using Float32 = DenseCells<kv_formats::float32, kFloat32>;
using Float16 = DenseCells<kv_formats::float16, kFloat16>;
using BFloat16 = DenseCells<kv_formats::bfloat16, kBFloat16>;

#if defined(__AVX512BF16__)
struct BFloat16Tiles : TiledCells<BFloat16Units> {
  using Format = kv_formats::bfloat16_tile16;
  static_assert(Format{}.k_unit() == 4 && Format{}.v_interleave() == 2);
  static constexpr int kKeyBytes = 64;
  static constexpr int kValueRegs = 4;
  static constexpr int kRegsPerLoad = 1;

  explicit BFloat16Tiles(const AttentionArgs& a)
      : BFloat16Tiles(a, Format{a.query.size, a.out.size}) {}
  BFloat16Tiles(const AttentionArgs& a, const Format& f)
      : TiledCells(a, 1, f.state_bytes(), f.v_region(), f.v_bytes()) {}

  VLLM_INLINE U load_keys(NoTables, const uint8_t* at) { return _mm512_loadu_si512(at); }
  template <int kRegs>
  __attribute__((always_inline)) void load_values(NoTables, const ValueGroup& group,
                                                  int elem, int count,
                                                  U (&r)[1][kRegs]) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i) r[0][i] = value_units(group.codes, elem, count, i);
  }
};
#endif

}  // namespace

const AttentionKernel* dense_attention(int32_t cell_format, int32_t query_dtype) {
  static constexpr AttentionKernel float32 = TileAttention<Float32>::kernel();
  static constexpr AttentionKernel float16 = TileAttention<Float16>::kernel();
  static constexpr AttentionKernel bfloat16 = TileAttention<BFloat16>::kernel();
#if defined(__AVX512BF16__)
  static constexpr AttentionKernel tiles = TileAttention<BFloat16Tiles>::kernel();
  const bool tiled = cell_format == (kCellsBFloat16 | kTiled);
  if (tiled && query_dtype == kBFloat16) return &tiles;
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
