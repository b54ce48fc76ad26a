// The same conversions by the headers of NVIDIA's toolkit, compiled for the host.
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <stdint.h>

extern "C" {

void codes_of(const float* x, int64_t count, int kind, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = kind == 0   ? __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3)
               : kind == 1 ? __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E5M2)
                           : __nv_cvt_float_to_fp4(x[i], __NV_E2M1, cudaRoundNearest);
  }
}

void values_of(const uint8_t* codes, int64_t count, int kind, float* x) {
  for (int64_t i = 0; i < count; ++i) {
    if (kind == 2) {
      x[i] = __half2float(__half(__nv_cvt_fp4_to_halfraw(codes[i], __NV_E2M1)));
    } else {
      const auto type = kind == 0 ? __NV_E4M3 : __NV_E5M2;
      x[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(codes[i], type)));
    }
  }
}
}
