// Writes one latent per token into its slot, in the format of its cells.
#include "kernels.h"
#include "latent_format.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

constexpr int32_t kParallelTokens = 64;  // below this, waking threads costs more

// hadamard(signs * x) in blocks of the largest power of two that divides the size, to
// the bits of kv_formats/hadamard.py, then rounded to the row's type.
template <int kDType>
void rotate(float* x, int size, const float* signs) {
  for (int i = 0; i < size; ++i) x[i] = finite_below(x[i], 0x1p112f) * signs[i];
  const int block = size & -size;
  for (int step = 1; step < block; step *= 2) {
    for (int at = 0; at < size; at += 2 * step) {
      float* const low = x + at;
      float* const high = low + step;
      for (int i = 0; i < step; ++i) {
        const float sum = low[i] + high[i];
        high[i] = low[i] - high[i];
        low[i] = sum;
      }
    }
  }
  if constexpr (kDType == kFloat32) return;
  const F limit = set1(kDType == kFloat16 ? 65504.f : 0x1.fep127f);
  for (int i = 0; i < size; i += kLanes) {
    uint8_t narrow[kLanes * 2];
    store_from_float<kDType>(narrow, max(sub(set1(0.f), limit), min(limit, load(x + i))));
    store(x + i, load_as_float<kDType>(narrow));
  }
}

template <int kDType>
void load_row(float* to, const uint8_t* from, int size, const float* signs) {
  for (int i = 0; i < size; i += kLanes) {
    store(to + i, load_as_float<kDType>(from + i * dtype_bytes(kDType)));
  }
  if (signs != nullptr) rotate<kDType>(to, size, signs);
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
      case kFloat32: load_row<kFloat32>(row, from, a.key.size, a.signs); break;
      case kFloat16: load_row<kFloat16>(row, from, a.key.size, a.signs); break;
      default: load_row<kBFloat16>(row, from, a.key.size, a.signs); break;
    }
    format->encode(args, row,
                   pages.data + slot / pages.block_size * pages.block_stride +
                       slot % pages.block_size * pages.state_stride);
  }
  return kOk;
}

}  // namespace vllm_cpu::VLLM_ISA
