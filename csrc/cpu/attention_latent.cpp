// Attention over one latent per token: keys are whole states, values their first
// elements. Dense cells are read where they lie; others become rows once per tile.
#include "../kv_formats.h"
#include "attention_tile.h"
#include "kernels.h"
#include "latent_format.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

// Rows of one float type, in the cache itself or made from it.
template <class UnitsOf, int kDType, bool kFromCells>
struct LatentRows : PlainCells<UnitsOf> {
  using Units = UnitsOf;
  static constexpr bool kDecoded = kFromCells;
  static constexpr int kBytes = dtype_bytes(kDType);
  static constexpr int kRegisterBytes = kLanes * Units::kElems * kBytes;
  static constexpr int kValueGroupBytes = Units::kElems * kRegisterBytes;
  static constexpr int kFewRows = 1;  // all query heads share the latent: there are many

  explicit LatentRows(const AttentionArgs& a)
      : PlainCells<UnitsOf>(a, a.query.size * kBytes),
        coding_args{a.query.size, a.k_scale, a.query.dtype},
        row_bytes(a.query.size * kBytes) {
    if constexpr (kDecoded) {
      const LatentFormat* const format = latent_format(a.cell_format);
      decoder = kDType == kFloat32 ? format->to_float32 : format->to_bfloat16;
      this->run.bytes = static_cast<int32_t>(format->cell_bytes(a.query.size));
    }
  }

  static int64_t decoded_bytes(const AttentionArgs& a) { return a.query.size * kBytes; }
  void decode(const uint8_t* cell, void* row) const { decoder(coding_args, cell, row); }

  U load_key(const uint8_t* row, int elem, int count) const {
    return as_units(load_as_float<kDType>(row + elem * kBytes, count));
  }
  void load_values(const uint8_t* const* rows, int elem, int count,
                   U (&r)[1][1]) const {
    r[0][0] = load_key(rows[0], elem, count);
  }

  CodingArgs coding_args;
  DecodeCell decoder = nullptr;
  int row_bytes;
};

#if defined(__AVX512BF16__)
template <bool kFromCells>
struct LatentPairs : LatentRows<BFloat16Units, kBFloat16, kFromCells> {
  using Base = LatentRows<BFloat16Units, kBFloat16, kFromCells>;
  using Base::Base;

  U load_key(const uint8_t* row, int elem, int count) const {
    return load_pairs(row + elem * Base::kBytes, count);
  }
  void load_values(const uint8_t* const* rows, int elem, int count,
                   U (&r)[1][2]) const {
    r[0][0] = load_key(rows[0], elem, count);
    r[0][1] = load_key(rows[1], elem, count);
    BFloat16Units::interleave(r[0]);
  }
};
#endif

}  // namespace

const AttentionKernel* latent_attention(int32_t cell_format, int32_t query_dtype) {
  static constexpr AttentionKernel float32 =
      TileAttention<LatentRows<Float32Units, kFloat32, false>>::kernel();
  static constexpr AttentionKernel float16 =
      TileAttention<LatentRows<Float32Units, kFloat16, false>>::kernel();
  static constexpr AttentionKernel bfloat16 =
      TileAttention<LatentRows<Float32Units, kBFloat16, false>>::kernel();
  static constexpr AttentionKernel decoded =
      TileAttention<LatentRows<Float32Units, kFloat32, true>>::kernel();
#if defined(__AVX512BF16__)
  static constexpr AttentionKernel pairs =
      TileAttention<LatentPairs<false>>::kernel();
  static constexpr AttentionKernel decoded_pairs =
      TileAttention<LatentPairs<true>>::kernel();
  if (query_dtype == kBFloat16) {
    if (cell_format == kLatentBFloat16) return &pairs;
    if (latent_format(cell_format) != nullptr) return &decoded_pairs;
  }
#else
  static_cast<void>(query_dtype);
#endif
  switch (cell_format) {
    case kLatentFloat32: return &float32;
    case kLatentFloat16: return &float16;
    case kLatentBFloat16: return &bfloat16;
    default: return latent_format(cell_format) == nullptr ? nullptr : &decoded;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
