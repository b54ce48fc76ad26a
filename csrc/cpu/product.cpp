// The small products of one instruction set.
#define VLLM_PRODUCT_UNIT
#include "product.h"

namespace vllm_cpu::VLLM_ISA {

template void product<Float32Units>(const ProductArgs&, int, int);
#if defined(__AVX512BF16__)
template void product<BFloat16Units>(const ProductArgs&, int, int);
template void product<Int8Units::Keys>(const ProductArgs&, int, int);
template void product<Int8Units::Values>(const ProductArgs&, int, int);
template void grouped_product<BFloat16Units>(const ProductArgs&, int, int);
#endif

}  // namespace vllm_cpu::VLLM_ISA
