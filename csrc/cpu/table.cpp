// The kernels of the instruction set this file is compiled for, as one table.
#include "kernels.h"

#define VLLM_STRING_(x) #x
#define VLLM_STRING(x) VLLM_STRING_(x)

namespace vllm_cpu::VLLM_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {VLLM_STRING(VLLM_ISA), dense_attention, store_cells,
                            read_bytes};

}  // namespace vllm_cpu::VLLM_ISA
