// A thread a pack of 16 bytes of a row (blockIdx.y walks these), which it reads of each of the row's experts. Of few
// rows all of it comes from the L2, and it is the launch that counts.
#include <algorithm>

#include "core/cuda.cuh"
#include "layers/moe/moe_combine.h"
#include "layers/moe/moe_combine_row.cuh"

namespace specdec::layers {
namespace {

constexpr int kThreads = 64;  // so that one row has some multiprocessors

template <class T, int N>
__global__ void __launch_bounds__(kThreads) moe_combine_kernel(MoeCombineParams p) {
  using P = Pack<T, N>;
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.width / N) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const P* made = reinterpret_cast<const P*>(static_cast<const T*>(p.made) + row * p.taken * p.made_stride) + i;
    reinterpret_cast<P*>(static_cast<T*>(p.out) + row * p.out_stride)[i] =
        combined(made, p.made_stride / N, p.shares + row * p.taken, p.taken);
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
    if (p.wide)
      start.template operator()<16 / sizeof(T)>();
    else
      start.template operator()<1>();
  });
}

}  // namespace specdec::layers
