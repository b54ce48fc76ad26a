// Latents as fp8 codes with one scale per tensor.
#include "../kv_formats.h"
#include "latent_format.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

template <class Format, F (*kFloat)(Codes), uint32_t (*kCode)(float)>
struct Fp8 {
  template <int kDType>
  static void decode(const CodingArgs& a, const uint8_t* cell, void* row) {
    const F scale = set1(a.scale);
    for (int i = 0; i < a.size; i += kLanes) {
      put<kDType>(row, i, mul(kFloat(load_bytes(cell + i)), scale));
    }
  }
  static void encode(const CodingArgs& a, const float* __restrict x,
                     uint8_t* __restrict cell) {
    const int size = a.size;
    const float scale = a.scale;
    for (int i = 0; i < size; ++i) cell[i] = static_cast<uint8_t>(kCode(x[i] / scale));
  }
  static int64_t cell_bytes(int size) { return Format{size, 0}.state_bytes(); }
  static constexpr LatentFormat format() {
    return {decode<kFloat32>, decode<kBFloat16>, encode, cell_bytes};
  }
};

}  // namespace

const LatentFormat* fp8_latent(int32_t cell_format) {
  static constexpr LatentFormat with_e4m3 =
      Fp8<kv_formats::fp8_e4m3, e4m3, e4m3_code>::format();
  static constexpr LatentFormat with_e5m2 =
      Fp8<kv_formats::fp8_e5m2, e5m2, e5m2_code>::format();
  switch (cell_format) {
    case kLatentE4M3: return &with_e4m3;
    case kLatentE5M2: return &with_e5m2;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
