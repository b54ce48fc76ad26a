// What the translation units of one instruction set give to its table.
#pragma once

#include "simd.h"
#include "work.h"

namespace vllm_cpu::VLLM_ISA {

const AttentionKernel* dense_attention(int32_t cell_format, int32_t query_dtype);
const AttentionKernel* latent_attention(int32_t cell_format, int32_t query_dtype);
const AttentionKernel* packed_attention(int32_t cell_format, int32_t query_dtype);
int32_t store_cells(const StoreArgs& args);
int32_t store_latents(const StoreArgs& args);
int32_t store_packed(const StoreArgs& args);
double read_bytes(const void* data, int64_t num_bytes);
const ExpertsKernel* experts(int32_t dtype);
const LinearKernel* linear(int32_t dtype);
const ScreenKernel* screen(int32_t dtype);
void step_rows(const StepOp& op, const StepInputs& in, int64_t begin, int64_t end);
void head_rows(const StepOp& op, const StepInputs& in, int64_t begin, int64_t end);

}  // namespace vllm_cpu::VLLM_ISA
