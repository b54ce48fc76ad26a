// Writes one latent per token into its slot, in the format of its cells.
#include "kernels.h"
#include "latent_format.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

constexpr int32_t kParallelTokens = 16;  // below this, waking threads costs more

template <int kDType>
void load_row(float* to, const uint8_t* from, int size) {
  for (int i = 0; i < size; i += kLanes) {
    store(to + i, load_as_float<kDType>(from + i * dtype_bytes(kDType)));
  }
}

}  // namespace

const LatentFormat* latent_format(int32_t cell_format) {
  const LatentFormat* found = fp8_latent(cell_format);
  if (found == nullptr) found = per_token_head_latent(cell_format);
  return found == nullptr ? ds_mla_latent(cell_format) : found;
}

int32_t store_latents(const StoreArgs& a) {
  const LatentFormat* const format = latent_format(a.cell_format);
  if (format == nullptr || a.key.size > kMaxLatent) return kUnsupported;
  const Pages& pages = a.pages;
  const int64_t num_slots = pages.num_blocks * pages.block_size;
  const CodingArgs args{a.key.size, a.k_scale, a.key.dtype};
#pragma omp parallel for schedule(static) if (a.num_tokens > kParallelTokens)
  for (int32_t token = 0; token < a.num_tokens; ++token) {
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0 || slot >= num_slots) continue;
    const uint8_t* const from = static_cast<const uint8_t*>(a.key.data) +
                                token * a.key.token_stride * dtype_bytes(a.key.dtype);
    float row[kMaxLatent];
    switch (a.key.dtype) {
      case kFloat32: load_row<kFloat32>(row, from, a.key.size); break;
      case kFloat16: load_row<kFloat16>(row, from, a.key.size); break;
      default: load_row<kBFloat16>(row, from, a.key.size); break;
    }
    format->encode(args, row,
                   pages.data + slot / pages.block_size * pages.block_stride +
                       slot % pages.block_size * pages.state_stride);
  }
  return kOk;
}

}  // namespace vllm_cpu::VLLM_ISA
