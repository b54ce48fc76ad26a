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

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {VLLM_STRING(VLLM_ISA), attention, store_cells,
                            read_bytes};

}  // namespace vllm_cpu::VLLM_ISA
