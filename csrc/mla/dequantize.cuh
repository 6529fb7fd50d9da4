// Dequantize elements of 8-bit latent rows in registers.
#pragma once

#include "attention/common/softmax.cuh"

namespace specdec::mla {

// Convert 16 float8_e4m3fn, times a factor, to the 16-bit type T.
template <class T>
__device__ __forceinline__ void dequantize(uint4 x, float factor, uint4 (&y)[2]) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  uint32_t pairs[8];
#pragma unroll
  for (int w = 0; w < 4; ++w)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __half2_raw pair =
          __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(words[w] >> 16 * half & 0xffff), __NV_E4M3);
      const float2 z = __half22float2(__half2(pair));
      pairs[2 * w + half] = attention::pack<T>(z.x * factor, z.y * factor);
    }
  y[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  y[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

}  // namespace specdec::mla
