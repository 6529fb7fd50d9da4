// A thread rotates one pair; neighbors of a head are read and written together. A few microseconds whatever it does:
// 16 heads of 64 elements are two kilobytes a row.
#include <cutlass/fast_math.h>

#include "core/cuda.cuh"
#include "mla/rope_heads.h"

namespace specdec::mla {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads)
    rope_heads_kernel(RopeHeadsParams p, cutlass::FastDivmod half, cutlass::FastDivmod heads) {
  begin_kernel();
  const int index = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  int at, i, row, head;
  half(at, i, index);
  heads(row, head, at);
  if (row < p.rows) rope_pair<T>(p, row, head, i);
}

}  // namespace

void rope_heads_cuda(const RopeHeadsParams& p, Stream stream) {
  const int64_t pairs = p.rows * p.heads * (p.rope_dim / 2);
  with_float_type(p.dtype, [&]<class T>() {
    launch("rope_heads", rope_heads_kernel<T>,
           {.grid = grid_x("rope_heads", (pairs + kThreads - 1) / kThreads), .threads = kThreads}, stream, p,
           cutlass::FastDivmod(static_cast<int>(p.rope_dim / 2)), cutlass::FastDivmod(static_cast<int>(p.heads)));
  });
}

}  // namespace specdec::mla
