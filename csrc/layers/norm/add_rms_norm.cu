// RMSNorm with fused residual add: sum = x + residual, out = rms_norm(sum) * weight, optionally quantized to FP8.
//
// One block per row (rms_norm_row.cuh). Reads x, residual and weight once; writes sum and out once. With topk_weights,
// x holds top_k expert outputs per row, which are combined first.
#include "layers/norm/add_rms_norm.h"
#include "layers/norm/rms_norm_row.cuh"

namespace specdec::layers {
namespace {

template <class T, int N, int kPacksPerThread, bool kQuantized, bool kCombine>
__global__ void __launch_bounds__(kMaxRmsNormThreads, kRmsNormBlocksPerSm<kPacksPerThread, kCombine>)
    add_rms_norm_kernel(AddRmsNormParams p) {
  using P = Pack<T, N>;
  const int64_t row = blockIdx.x;
  const auto find = [&] {
    RmsNormRow<P> found{};
    found.x = reinterpret_cast<const P*>(static_cast<const T*>(p.x) + row * p.top_k * p.x_stride);
    if (p.residual) {
      found.residual = reinterpret_cast<const P*>(static_cast<const T*>(p.residual) + row * p.residual_stride);
      found.sum = reinterpret_cast<P*>(static_cast<T*>(p.out_sum) + row * p.sum_stride);
    }
    if constexpr (!kQuantized) found.out = reinterpret_cast<P*>(static_cast<T*>(p.out) + row * p.out_stride);
    if constexpr (kCombine) {
      found.topk_weights = p.topk_weights + row * p.top_k;
      found.top_k = p.top_k;
      found.x_stride = p.x_stride / N;
    }
    return found;
  };
  QuantizedRow quantized{};
  if constexpr (kQuantized)
    quantized = {static_cast<Float8*>(p.out) + row * p.out_stride, p.scales + row, p.scales_stride, p.groups > 1};
  rms_norm_row<T, N, kPacksPerThread, kQuantized, kCombine>(static_cast<const P*>(p.weight), static_cast<int>(p.width),
                                                            p.eps, find, quantized);
}

}  // namespace

void add_rms_norm_cuda(const AddRmsNormParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    with_rms_norm_shape<T>(
        "add_rms_norm", p.rows, p.width, p.vectorized, [&]<int N, int kPacksPerThread>(unsigned threads) {
          const auto start = [&](void (*kernel)(AddRmsNormParams)) {
            launch("add_rms_norm", kernel, {.grid = grid_x("add_rms_norm", p.rows), .threads = threads}, stream, p);
          };
          const auto with_combine = [&]<bool kCombine>() {
            if (p.scales == nullptr) return start(add_rms_norm_kernel<T, N, kPacksPerThread, false, kCombine>);
            if constexpr (N > 1) start(add_rms_norm_kernel<T, N, kPacksPerThread, true, kCombine>);
          };
          p.topk_weights ? with_combine.template operator()<true>() : with_combine.template operator()<false>();
        });
  });
}

}  // namespace specdec::layers
