// fp8 codes with one scale per tensor, which the caller applies to scores and sums.
#include "../kv_formats.h"
#include "attention_tile.h"
#include "packed.h"
#include "pairs.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

#if defined(__AVX512BF16__)
template <class Format, class Code>
struct Fp8Pairs : PairCells<Bytes<Code>, Bytes<Code>> {
  using Base = PairCells<Bytes<Code>, Bytes<Code>>;

  static_assert(Format{}.k_unit() == 4 && Format{}.v_interleave() == 4);

  explicit Fp8Pairs(const AttentionArgs& a)
      : Fp8Pairs(a, Format{a.query.size, a.out.size}) {}
  Fp8Pairs(const AttentionArgs& a, const Format& f)
      : Base(a, f.state_bytes(), f.v_region(), f.v_bytes(), {}) {}
};
#endif

template <class Format, class Tiles, F (*kFloat)(Codes), uint32_t (*kCode)(float)>
struct Fp8 {
  static PageRun page_run(const PackedArgs& a, const Pages& pages, int) {
    return cell_run(pages, Format{a.size, a.size_v}.state_bytes());
  }

  static void decode(const PackedArgs& a, const State& state, float* key, float* value) {
    const Format format{a.size, a.size_v};
    unpack_bytes<kFloat>(key, state.cell + format.k_offset(), a.size);
    unpack_bytes<kFloat>(value, state.cell + format.v_offset(), a.size_v);
  }

  static void encode_side(uint8_t* to, const float* x, int size, float scale) {
    if (scale == 1.f) {
      for (int i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(kCode(x[i]));
    } else {
      for (int i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(kCode(x[i] / scale));
    }
  }

  static void encode(const PackedArgs& a, const MutableState& state, float* key,
                     float* value) {
    const Format format{a.size, a.size_v};
    encode_side(state.cell + format.k_offset(), key, a.size, a.k_scale);
    encode_side(state.cell + format.v_offset(), value, a.size_v, a.v_scale);
  }

  static TurnsOf turns(const PackedArgs& a) {
    const Tiles f{a.size, a.size_v};
    return {2, {VLLM_TURNS(f, k, 0), VLLM_TURNS(f, v, 0)}};
  }

  static constexpr PackedFormat format(const AttentionKernel* pairs) {
    return {Rotation::kNone, page_run, 1, decode, encode, encode_cell<encode>, turns, pairs};
  }
};

}  // namespace

const PackedFormat* packed_fp8(int32_t cell_format) {
  using E4M3 = kv_formats::fp8_e4m3;
  using E5M2 = kv_formats::fp8_e5m2;
  using E4M3Tiles = kv_formats::fp8_e4m3_tile16;
  using E5M2Tiles = kv_formats::fp8_e5m2_tile16;
  static constexpr PackedFormat e4m3_format =
      Fp8<E4M3, E4M3Tiles, e4m3, e4m3_code>::format(
          VLLM_PAIRS(Fp8Pairs<E4M3Tiles, E4M3Bytes>));
  static constexpr PackedFormat e5m2_format =
      Fp8<E5M2, E5M2Tiles, e5m2, e5m2_code>::format(
          VLLM_PAIRS(Fp8Pairs<E5M2Tiles, E5M2Bytes>));
  switch (cell_format) {
    case kCellsE4M3: return &e4m3_format;
    case kCellsE5M2: return &e5m2_format;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
