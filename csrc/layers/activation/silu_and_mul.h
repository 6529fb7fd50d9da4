// silu_and_mul: silu(gate) * up (SwiGLU) of rows that hold the gate half, then the up half.
#pragma once

#include <cmath>

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

struct SiluAndMulParams {
  const void* x;  // [rows, 2 * width]
  void* out;      // [rows, width]
  int64_t rows, width;
  int64_t x_stride, out_stride;  // between rows, in elements
  Dtypes dtype;
  bool vectorized;  // all rows allow 16-byte accesses
};

// Return silu(gate) * up.
SD_HD float silu_mul(float gate, float up) {
#ifdef __CUDA_ARCH__
  // Two special-function and four FMA-pipe instructions: fused after a GEMM of many rows, this is the cost.
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + power));
  return up * (gate * inverse);
#else
  return up * (gate / (1 + std::exp(-gate)));
#endif
}

void silu_and_mul(CallStream stream, const TensorView& x, const TensorView& out);

void silu_and_mul_cpu(const SiluAndMulParams& p);
void silu_and_mul_cuda(const SiluAndMulParams& p, Stream stream);

}  // namespace specdec::layers
