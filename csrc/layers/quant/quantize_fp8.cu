// A warp for each 128 numbers, which it holds; of whole rows a block, whose warps agree on the largest and read their
// numbers again. Reads x, and writes half as many bytes or a quarter: with few rows it is the launch that counts.
#include <algorithm>

#include "core/warp.cuh"
#include "layers/pack.cuh"
#include "layers/quant/quantize_fp8.h"

namespace specdec::layers {
namespace {

constexpr int kThreads = 256, kRowThreads = 1024;
constexpr int kOfLane = kRoundGroup / kWarp;

__device__ __forceinline__ float warp_largest(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
  return x;
}

// A lane's numbers of those from `begin` on, 0 behind the last.
template <class T, bool kWide>
__device__ __forceinline__ void read(const T* x, int64_t begin, int64_t width, float (&values)[kOfLane]) {
  if constexpr (kWide) {
    const int64_t at = begin + lane_id() * kOfLane;
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) values[n] = 0;
    if (at < width) unpack(*reinterpret_cast<const Pack<T, kOfLane>*>(x + at), values);
  } else {
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
      const int64_t at = begin + n * kWarp + lane_id();
      values[n] = at < width ? to_float(x[at]) : 0;
    }
  }
}

template <bool kWide>
__device__ __forceinline__ void write(Float8* numbers, int64_t begin, int64_t width, const float (&values)[kOfLane],
                                      float scale) {
  if constexpr (kWide) {
    const int64_t at = begin + lane_id() * kOfLane;
    Pack<Float8, kOfLane> pack;
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) pack.x[n] = scaled(values[n], scale);
    if (at < width) *reinterpret_cast<Pack<Float8, kOfLane>*>(numbers + at) = pack;
  } else {
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
      const int64_t at = begin + n * kWarp + lane_id();
      if (at < width) numbers[at] = scaled(values[n], scale);
    }
  }
}

__device__ __forceinline__ float largest_of(const float (&values)[kOfLane]) {
  float largest = 0;
#pragma unroll
  for (int n = 0; n < kOfLane; ++n) largest = fmaxf(largest, fabsf(values[n]));
  return largest;
}

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads) round_groups_kernel(QuantizeFp8Params p) {
  begin_kernel();
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id();
  if (warp >= p.rows * p.groups) return;
  const int64_t row = warp / p.groups, group = warp % p.groups, begin = group * kRoundGroup;
  float values[kOfLane];
  read<T, kWide>(static_cast<const T*>(p.x) + row * p.x_stride, begin, p.width, values);
  const float scale = scale_of(warp_largest(largest_of(values)));
  if (lane_id() == 0) p.scales[group * p.scales_stride + row] = scale;
  write<kWide>(p.numbers + row * p.numbers_stride, begin, p.width, values, scale);
}

template <class T, bool kWide>
__global__ void __launch_bounds__(kRowThreads) quantize_fp8_kernel(QuantizeFp8Params p) {
  __shared__ float of_warps[kRowThreads / kWarp];
  begin_kernel();
  const int64_t row = blockIdx.x, step = int64_t{blockDim.x} / kWarp * kRoundGroup;
  const T* const x = static_cast<const T*>(p.x) + row * p.x_stride;
  float values[kOfLane], scale;
  if (p.given) {
    scale = fmaxf(*p.given, kSmallestScale);
  } else {
    float largest = 0;
    for (int64_t begin = warp_id() * kRoundGroup; begin < p.width; begin += step) {
      read<T, kWide>(x, begin, p.width, values);
      largest = fmaxf(largest, largest_of(values));
    }
    largest = warp_largest(largest);
    if (lane_id() == 0) of_warps[warp_id()] = largest;
    __syncthreads();
    largest = lane_id() < static_cast<int>(blockDim.x) / kWarp ? of_warps[lane_id()] : 0;
    scale = scale_of(warp_largest(largest));
  }
  if (threadIdx.x == 0) p.scales[row] = scale;
  for (int64_t begin = warp_id() * kRoundGroup; begin < p.width; begin += step) {
    read<T, kWide>(x, begin, p.width, values);
    write<kWide>(p.numbers + row * p.numbers_stride, begin, p.width, values, scale);
  }
}

template <class T, bool kWide>
void start(const QuantizeFp8Params& p, Stream stream) {
  if (p.groups > 1) {
    const int64_t warps = p.rows * p.groups, of_block = kThreads / kWarp;
    launch("quantize_fp8", round_groups_kernel<T, kWide>,
           {.grid = grid_x("quantize_fp8", (warps + of_block - 1) / of_block), .threads = kThreads}, stream, p);
  } else {
    const int64_t warps = (p.width + kRoundGroup - 1) / kRoundGroup;
    launch("quantize_fp8", quantize_fp8_kernel<T, kWide>,
           {.grid = grid_x("quantize_fp8", p.rows),
            .threads = static_cast<unsigned>(std::min<int64_t>(warps * kWarp, kRowThreads))},
           stream, p);
  }
}

}  // namespace

void quantize_fp8_cuda(const QuantizeFp8Params& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() { p.wide ? start<T, true>(p, stream) : start<T, false>(p, stream); });
}

}  // namespace specdec::layers
