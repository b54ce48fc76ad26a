// The kernels of the instruction set this file is compiled for, as one table.
#include "kernels.h"

#define VLLM_STRING_(x) #x
#define VLLM_STRING(x) VLLM_STRING_(x)

namespace vllm_cpu::VLLM_ISA {

namespace {

const AttentionKernel* attention(int32_t cell_format, int32_t query_dtype) {
  const AttentionKernel* const dense = dense_attention(cell_format, query_dtype);
  if (dense != nullptr) return dense;
  const AttentionKernel* const packed = packed_attention(cell_format, query_dtype);
  return packed == nullptr ? latent_attention(cell_format, query_dtype) : packed;
}

int32_t store(const StoreArgs& args) {
  if (args.cell_format >= kLatentFloat32) return store_latents(args);
  return (args.cell_format & ~kTiled) > kCellsBFloat16 ? store_packed(args) : store_cells(args);
}

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {VLLM_STRING(VLLM_ISA), attention, store,
                            read_bytes, experts, linear, screen, step_rows, head_rows};

}  // namespace vllm_cpu::VLLM_ISA
