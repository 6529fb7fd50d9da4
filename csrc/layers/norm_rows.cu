// A block a row (norm_row.cuh). Reads x, residual and the weight and writes sum and result once, which may be
// rounded to 8 bits on the way.
#include "layers/norm_row.cuh"
#include "layers/norm_rows.h"

namespace specdec::layers {
namespace {

template <class T, int N, int kHeld, bool kRounded>
__global__ void __launch_bounds__(kMaxNormThreads, kNormBlocks<kHeld>) norm_rows_kernel(NormRowsParams p) {
  using P = Pack<T, N>;
  begin_kernel();
  const int64_t row = blockIdx.x;
  NormRow<P> of_block{};
  of_block.x = reinterpret_cast<const P*>(static_cast<const T*>(p.x) + row * p.x_stride);
  of_block.weight = static_cast<const P*>(p.weight);
  if (p.residual) {
    of_block.residual = reinterpret_cast<const P*>(static_cast<const T*>(p.residual) + row * p.residual_stride);
    of_block.sum = reinterpret_cast<P*>(static_cast<T*>(p.out_sum) + row * p.sum_stride);
  }
  const int width = static_cast<int>(p.width);
  if constexpr (kRounded) {
    Float8* const numbers = static_cast<Float8*>(p.out) + row * p.out_stride;
    norm_row<T, N, kHeld, true>(of_block, width, p.eps, {numbers, p.scales + row, p.scales_stride, p.groups > 1});
  } else {
    of_block.out = reinterpret_cast<P*>(static_cast<T*>(p.out) + row * p.out_stride);
    norm_row<T, N, kHeld>(of_block, width, p.eps);
  }
}

}  // namespace

void norm_rows_cuda(const NormRowsParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    with_norm_threads<T>("norm_rows", p.rows, p.width, p.wide, [&]<int N, int kHeld>(unsigned threads) {
      const auto start = [&](void (*kernel)(NormRowsParams)) {
        launch("norm_rows", kernel, {.grid = grid_x("norm_rows", p.rows), .threads = threads}, stream, p);
      };
      if (p.scales == nullptr) return start(norm_rows_kernel<T, N, kHeld, false>);
      if constexpr (N > 1) start(norm_rows_kernel<T, N, kHeld, true>);
    });
  });
}

}  // namespace specdec::layers
