// A block a row (norm_row.cuh). Reads x, residual and the weight and writes sum and result once.
#include "layers/norm_row.cuh"
#include "layers/norm_rows.h"

namespace specdec::layers {
namespace {

template <class T, int N, int kHeld>
__global__ void __launch_bounds__(kMaxNormThreads, kNormBlocks<kHeld>) norm_rows_kernel(NormRowsParams p) {
  using P = Pack<T, N>;
  begin_kernel();
  const int64_t row = blockIdx.x;
  NormRow<P> of_block{};
  of_block.x = reinterpret_cast<const P*>(static_cast<const T*>(p.x) + row * p.x_stride);
  of_block.weight = static_cast<const P*>(p.weight);
  of_block.out = reinterpret_cast<P*>(static_cast<T*>(p.out) + row * p.out_stride);
  if (p.residual) {
    of_block.residual = reinterpret_cast<const P*>(static_cast<const T*>(p.residual) + row * p.residual_stride);
    of_block.sum = reinterpret_cast<P*>(static_cast<T*>(p.out_sum) + row * p.sum_stride);
  }
  norm_row<T, N, kHeld>(of_block, static_cast<int>(p.width), p.eps);
}

}  // namespace

void norm_rows_cuda(const NormRowsParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    with_norm_threads<T>("norm_rows", p.rows, p.width, p.wide, [&]<int N, int kHeld>(unsigned threads) {
      launch("norm_rows", norm_rows_kernel<T, N, kHeld>, {.grid = grid_x("norm_rows", p.rows), .threads = threads},
             stream, p);
    });
  });
}

}  // namespace specdec::layers
