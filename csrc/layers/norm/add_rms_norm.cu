// A block a row (norm_row.cuh). Reads x, residual and the weight and writes sum and result once, which may be
// rounded to 8 bits on the way. With shares, x is read as often as experts made a part of it.
#include "layers/norm/add_rms_norm.h"
#include "layers/norm/rms_norm_row.cuh"

namespace specdec::layers {
namespace {

template <class T, int N, int kHeld, bool kRounded, bool kShared>
__global__ void __launch_bounds__(kMaxNormThreads, kNormBlocks<kHeld, kShared>)
    add_rms_norm_kernel(AddRmsNormParams p) {
  using P = Pack<T, N>;
  const int64_t row = blockIdx.x;
  const auto find = [&] {
    NormRow<P> found{};
    found.x = reinterpret_cast<const P*>(static_cast<const T*>(p.x) + row * p.taken * p.x_stride);
    if (p.residual) {
      found.residual = reinterpret_cast<const P*>(static_cast<const T*>(p.residual) + row * p.residual_stride);
      found.sum = reinterpret_cast<P*>(static_cast<T*>(p.out_sum) + row * p.sum_stride);
    }
    if constexpr (!kRounded) found.out = reinterpret_cast<P*>(static_cast<T*>(p.out) + row * p.out_stride);
    if constexpr (kShared) {
      found.shares = p.shares + row * p.taken;
      found.taken = p.taken;
      found.x_stride = p.x_stride / N;
    }
    return found;
  };
  RoundedRow rounded{};
  if constexpr (kRounded)
    rounded = {static_cast<Float8*>(p.out) + row * p.out_stride, p.scales + row, p.scales_stride, p.groups > 1};
  norm_row<T, N, kHeld, kRounded, kShared>(static_cast<const P*>(p.weight), static_cast<int>(p.width), p.eps, find,
                                           rounded);
}

}  // namespace

void add_rms_norm_cuda(const AddRmsNormParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    with_norm_threads<T>("add_rms_norm", p.rows, p.width, p.wide, [&]<int N, int kHeld>(unsigned threads) {
      const auto start = [&](void (*kernel)(AddRmsNormParams)) {
        launch("add_rms_norm", kernel, {.grid = grid_x("add_rms_norm", p.rows), .threads = threads}, stream, p);
      };
      const auto of_shares = [&]<bool kShared>() {
        if (p.scales == nullptr) return start(add_rms_norm_kernel<T, N, kHeld, false, kShared>);
        if constexpr (N > 1) start(add_rms_norm_kernel<T, N, kHeld, true, kShared>);
      };
      p.shares ? of_shares.template operator()<true>() : of_shares.template operator()<false>();
    });
  });
}

}  // namespace specdec::layers
