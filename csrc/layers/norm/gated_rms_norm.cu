// RMSNorm of groups of elements with a gate, as recurrent layers have it after the recurrence.
//
// One block per (row, group), which reads its elements twice, the second time from L1 or L2: to sum squares, and to
// write. Reads x, gate and weight once from memory and writes out once. Groups have 64 to 8192 elements, and few rows
// are bound by launch latency.
#include <algorithm>

#include "core/cuda.cuh"
#include "layers/norm/gated_rms_norm.h"
#include "layers/norm/rms_norm_row.cuh"

namespace specdec::layers {
namespace {

constexpr int64_t kElementsPerThread = 4;

template <class X, class T>
__global__ void __launch_bounds__(kMaxRmsNormThreads) gated_rms_norm_kernel(GatedRmsNormParams p) {
  begin_kernel();
  const int64_t row = blockIdx.x / p.groups, group = blockIdx.x % p.groups;
  const X* const x = static_cast<const X*>(p.x) + row * p.x_strides[0] + group * p.x_strides[1];
  const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_strides[0] + group * p.gate_strides[1];
  const T* const weight = static_cast<const T*>(p.weight) + group * p.weight_stride;
  T* const out = static_cast<T*>(p.out) + row * p.out_strides[0] + group * p.out_strides[1];
  const auto normed_value = [&](int64_t i) {
    return p.gates_first ? gated(p.sigmoid, to_float(gate[i]), to_float(x[i])) : to_float(x[i]);
  };
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.width; i += blockDim.x) {
    const float value = normed_value(i);
    squares += value * value;
  }
  const float scale = rsqrtf(block_sum(squares) / static_cast<float>(p.width) + p.eps);
  for (int64_t i = threadIdx.x; i < p.width; i += blockDim.x) {
    const float normed = normed_value(i) * scale * to_float(weight[i]);
    out[i] = from_float<T>(p.gates_first ? normed : gated(p.sigmoid, to_float(gate[i]), normed));
  }
}

}  // namespace

void gated_rms_norm_cuda(const GatedRmsNormParams& p, Stream stream) {
  const int64_t wanted = (p.width + kElementsPerThread - 1) / kElementsPerThread;
  const int64_t warps = std::clamp<int64_t>((wanted + kWarp - 1) / kWarp, 1, kMaxRmsNormThreads / kWarp);
  with_gated_types(p, [&]<class X, class T>() {
    launch("gated_rms_norm", gated_rms_norm_kernel<X, T>,
           {.grid = dim3(grid_x("gated_rms_norm", p.rows * p.groups)),
            .threads = dim3(static_cast<unsigned>(warps * kWarp))},
           stream, p);
  });
}

}  // namespace specdec::layers
