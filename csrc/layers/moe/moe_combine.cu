// MoE combine: out[row] = sum over j of topk_weights[row, j] * expert_outputs[row * top_k + j].
//
// One thread per 16-byte pack of a row (blockIdx.y strides over rows); it reads that pack of each expert output. With
// few rows everything is in L2, and launch latency dominates.
#include <algorithm>

#include "core/cuda.cuh"
#include "layers/moe/moe_combine.h"
#include "layers/moe/moe_combine_row.cuh"

namespace specdec::layers {
namespace {

constexpr int kThreads = 64;  // small, so one row spreads over several SMs

template <class T, int N>
__global__ void __launch_bounds__(kThreads) moe_combine_kernel(MoeCombineParams p) {
  using P = Pack<T, N>;
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.width / N) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const P* expert_outputs =
        reinterpret_cast<const P*>(static_cast<const T*>(p.expert_outputs) + row * p.top_k * p.expert_outputs_stride) +
        i;
    reinterpret_cast<P*>(static_cast<T*>(p.out) + row * p.out_stride)[i] =
        combine_pack(expert_outputs, p.expert_outputs_stride / N, p.topk_weights + row * p.top_k, p.top_k);
  }
}

}  // namespace

void moe_combine_cuda(const MoeCombineParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    const auto start = [&]<int N>() {
      const dim3 grid(grid_x("moe_combine", (p.width / N + kThreads - 1) / kThreads),
                      static_cast<unsigned>(std::min(p.rows, kMaxGridY)));
      launch("moe_combine", moe_combine_kernel<T, N>, {.grid = grid, .threads = kThreads}, stream, p);
    };
    if (p.vectorized)
      start.template operator()<16 / sizeof(T)>();
    else
      start.template operator()<1>();
  });
}

}  // namespace specdec::layers
