// The kernels of the instruction set this file is compiled for, as one table.
#include "kernels.h"

#define VLLM_STRING_(x) #x
#define VLLM_STRING(x) VLLM_STRING_(x)

namespace vllm_cpu::VLLM_ISA {

namespace {

const AttentionKernel* attention(int32_t cell_format, int32_t query_dtype) {
  const AttentionKernel* const dense = dense_attention(cell_format, query_dtype);
  return dense == nullptr ? latent_attention(cell_format, query_dtype) : dense;
}

int32_t store(const StoreArgs& args) {
  return args.cell_format < kLatentFloat32 ? store_cells(args) : store_latents(args);
}

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {VLLM_STRING(VLLM_ISA), attention, store,
                            read_bytes};

}  // namespace vllm_cpu::VLLM_ISA
