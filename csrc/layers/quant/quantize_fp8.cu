// FP8 quantization: scale = max |x| / 448 over a group or a row, out = x / scale.
//
// Per group: one warp per 128 elements, kept in registers. Per row: one block per row, whose warps agree on the maximum
// and read their elements again. Reads x, writes half or a quarter as many bytes. With few rows launch latency
// dominates.
#include <algorithm>

#include "core/pack.cuh"
#include "core/warp.cuh"
#include "layers/quant/quantize_fp8.h"

namespace specdec::layers {
namespace {

constexpr int kThreads = 256, kMaxRowThreads = 1024;
constexpr int kPerLane = kFp8Group / kWarp;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
  return x;
}

// Read this lane's elements of the group at `begin`; 0 past the end of the row.
template <class T, bool kVectorized>
__device__ __forceinline__ void read(const T* x, int64_t begin, int64_t width, float (&values)[kPerLane]) {
  if constexpr (kVectorized) {
    const int64_t at = begin + lane_id() * kPerLane;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) values[n] = 0;
    if (at < width) unpack(*reinterpret_cast<const Pack<T, kPerLane>*>(x + at), values);
  } else {
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int64_t at = begin + n * kWarp + lane_id();
      values[n] = at < width ? to_float(x[at]) : 0;
    }
  }
}

template <bool kVectorized>
__device__ __forceinline__ void write(Float8* out, int64_t begin, int64_t width, const float (&values)[kPerLane],
                                      float scale) {
  if constexpr (kVectorized) {
    const int64_t at = begin + lane_id() * kPerLane;
    Pack<Float8, kPerLane> pack;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) pack.x[n] = to_fp8(values[n], scale);
    if (at < width) *reinterpret_cast<Pack<Float8, kPerLane>*>(out + at) = pack;
  } else {
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int64_t at = begin + n * kWarp + lane_id();
      if (at < width) out[at] = to_fp8(values[n], scale);
    }
  }
}

__device__ __forceinline__ float max_of(const float (&values)[kPerLane]) {
  float max = 0;
#pragma unroll
  for (int n = 0; n < kPerLane; ++n) max = fmaxf(max, fabsf(values[n]));
  return max;
}

template <class T, bool kVectorized>
__global__ void __launch_bounds__(kThreads) quantize_groups_kernel(QuantizeFp8Params p) {
  begin_kernel();
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id();
  if (warp >= p.rows * p.groups) return;
  const int64_t row = warp / p.groups, group = warp % p.groups, begin = group * kFp8Group;
  float values[kPerLane];
  read<T, kVectorized>(static_cast<const T*>(p.x) + row * p.x_stride, begin, p.width, values);
  const float scale = fp8_scale(warp_max(max_of(values)));
  if (lane_id() == 0) p.scales[group * p.scales_stride + row] = scale;
  write<kVectorized>(p.out + row * p.out_stride, begin, p.width, values, scale);
}

template <class T, bool kVectorized>
__global__ void __launch_bounds__(kMaxRowThreads) quantize_rows_kernel(QuantizeFp8Params p) {
  __shared__ float warp_maxima[kMaxRowThreads / kWarp];
  begin_kernel();
  const int64_t row = blockIdx.x, step = int64_t{blockDim.x} / kWarp * kFp8Group;
  const T* const x = static_cast<const T*>(p.x) + row * p.x_stride;
  float values[kPerLane], scale;
  if (p.scale_in) {
    scale = fmaxf(*p.scale_in, kMinScale);
  } else {
    float max = 0;
    for (int64_t begin = warp_id() * kFp8Group; begin < p.width; begin += step) {
      read<T, kVectorized>(x, begin, p.width, values);
      max = fmaxf(max, max_of(values));
    }
    max = warp_max(max);
    if (lane_id() == 0) warp_maxima[warp_id()] = max;
    __syncthreads();
    max = lane_id() < static_cast<int>(blockDim.x) / kWarp ? warp_maxima[lane_id()] : 0;
    scale = fp8_scale(warp_max(max));
  }
  if (threadIdx.x == 0) p.scales[row] = scale;
  for (int64_t begin = warp_id() * kFp8Group; begin < p.width; begin += step) {
    read<T, kVectorized>(x, begin, p.width, values);
    write<kVectorized>(p.out + row * p.out_stride, begin, p.width, values, scale);
  }
}

template <class T, bool kVectorized>
void start(const QuantizeFp8Params& p, Stream stream) {
  if (p.groups > 1) {
    const int64_t warps = p.rows * p.groups, of_block = kThreads / kWarp;
    launch("quantize_fp8", quantize_groups_kernel<T, kVectorized>,
           {.grid = grid_x("quantize_fp8", (warps + of_block - 1) / of_block), .threads = kThreads}, stream, p);
  } else {
    const int64_t warps = (p.width + kFp8Group - 1) / kFp8Group;
    launch("quantize_fp8", quantize_rows_kernel<T, kVectorized>,
           {.grid = grid_x("quantize_fp8", p.rows),
            .threads = static_cast<unsigned>(std::min<int64_t>(warps * kWarp, kMaxRowThreads))},
           stream, p);
  }
}

}  // namespace

void quantize_fp8_cuda(const QuantizeFp8Params& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() { p.vectorized ? start<T, true>(p, stream) : start<T, false>(p, stream); });
}

}  // namespace specdec::layers
