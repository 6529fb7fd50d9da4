// SwiGLU activation: out = silu(gate) * up, for rows that hold gate and up halves.
//
// One thread per 16-byte pack of a row; blockIdx.y strides over rows. Reads 2 * width and writes width elements per
// row. With few rows all traffic stays in L2, and launch latency dominates.
#include <algorithm>

#include "core/cuda.cuh"
#include "core/pack.cuh"
#include "layers/activation/silu_and_mul.h"

namespace specdec::layers {
namespace {

constexpr int kThreads = 128;

template <class T, int N>
__global__ void __launch_bounds__(kThreads) silu_and_mul_kernel(SiluAndMulParams p) {
  using P = Pack<T, N>;
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.width / N) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    float gate[N], up[N];
    unpack(reinterpret_cast<const P*>(x)[i], gate);
    unpack(reinterpret_cast<const P*>(x + p.width)[i], up);
#pragma unroll
    for (int n = 0; n < N; ++n) up[n] = silu_mul(gate[n], up[n]);
    reinterpret_cast<P*>(static_cast<T*>(p.out) + row * p.out_stride)[i] = pack_of<T>(up);
  }
}

}  // namespace

void silu_and_mul_cuda(const SiluAndMulParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    const auto start = [&]<int N>() {
      const dim3 grid(grid_x("silu_and_mul", (p.width / N + kThreads - 1) / kThreads),
                      static_cast<unsigned>(std::min(p.rows, kMaxGridY)));
      launch("silu_and_mul", silu_and_mul_kernel<T, N>, {.grid = grid, .threads = kThreads}, stream, p);
    };
    if (p.vectorized)
      start.template operator()<16 / sizeof(T)>();
    else
      start.template operator()<1>();
  });
}

}  // namespace specdec::layers
