// RMSNorm of one row by one block, with optional MoE combine and residual add before it and FP8 quantization after it.
//
// Threads keep what they read in registers until the sum of squares is known; all loads are issued before the first
// use. With few rows latency dominates, so a thread makes one 16-byte read of each operand; with many rows, fewer
// threads with two reads each wait less for one another. Register use allows at least 1024 threads per SM, except when
// expert outputs are combined. No kernel writes the weight, so it is loaded before the previous kernels have finished.
#pragma once

#include <algorithm>

#include "core/warp.cuh"
#include "layers/moe/moe_combine_row.cuh"
#include "layers/quant/quantize_fp8.h"

namespace specdec::layers {

constexpr int kMaxRmsNormThreads = 512;
// Minimum blocks per SM (launch bounds).
template <int kPacksPerThread, bool kCombine = false>
constexpr int kRmsNormBlocksPerSm = kCombine               ? 1
                                    : kPacksPerThread == 1 ? 3
                                                           : 2;

template <class P>
struct RmsNormRow {
  const P *x, *residual;  // residual may be null
  P* sum;                 // receives x + residual, or null
  P* out;                 // null if the result is quantized
  const float*
      topk_weights;  // with kCombine: weights of top_k rows of x, x_stride packs apart, which are combined first
  int64_t top_k, x_stride;
};

// An FP8 result, with one scale per kFp8Group elements or one per row.
struct QuantizedRow {
  Float8* out;
  float* scales;
  int64_t stride;  // between groups
  bool by_groups;
};

__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[kMaxRmsNormThreads / kWarp];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = threadIdx.x % kWarp < blockDim.x / kWarp ? sums[threadIdx.x % kWarp] : 0;
  return warp_sum(x);
}

// Return the maximum over kLanes adjacent lanes, of values >= 0.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
  return x;
}
__device__ __forceinline__ float block_max(float x) {
  __shared__ float warp_maxima[kMaxRmsNormThreads / kWarp];
  x = lanes_max<kWarp>(x);
  if (threadIdx.x % kWarp == 0) warp_maxima[threadIdx.x / kWarp] = x;
  __syncthreads();
  return lanes_max<kWarp>(threadIdx.x % kWarp < blockDim.x / kWarp ? warp_maxima[threadIdx.x % kWarp] : 0);
}

// Normalize one row; the first statement of a kernel. find() returns the block's RmsNormRow, or what has its fields,
// and is called once previous kernels have finished. A thread keeps kPacksPerThread packs; packs of longer rows are
// read twice.
template <class T, int N, int kPacksPerThread, bool kQuantized = false, bool kCombine = false, class Find>
__device__ __forceinline__ void rms_norm_row(const Pack<T, N>* weight, int width, float eps, Find&& find,
                                             const QuantizedRow& quantized = {}) {
  using P = Pack<T, N>;
  const int packs = width / N, threads = static_cast<int>(blockDim.x);
  P x_packs[kPacksPerThread], more[kPacksPerThread], weights[kPacksPerThread];
  const auto for_each_held = [&](auto&& use) {
#pragma unroll
    for (int h = 0; h < kPacksPerThread; ++h) {
      const int i = static_cast<int>(threadIdx.x) + h * threads;
      if (i < packs) use(h, i);
    }
  };
  for_each_held([&](int h, int i) { weights[h] = weight[i]; });
  begin_kernel();
  const auto row = find();

  // Add and round to T: the sum is normalized as it is stored.
  const auto add = [](P& value, const P& more) {
    float a[N], b[N];
    unpack(value, a);
    unpack(more, b);
#pragma unroll
    for (int n = 0; n < N; ++n) a[n] += b[n];
    value = pack_of<T>(a);
  };
  const auto read_x = [&](int i) {
    if constexpr (kCombine)
      return combine_pack(row.x + i, row.x_stride, row.topk_weights, row.top_k);
    else
      return row.x[i];
  };
  const auto read = [&](int i) {
    P value = read_x(i);
    if (row.residual) add(value, row.residual[i]);
    return value;
  };
  float squares = 0;
  const auto square = [&](const P& pack) {
    float a[N];
    unpack(pack, a);
#pragma unroll
    for (int n = 0; n < N; ++n) squares += a[n] * a[n];
  };
  // Issue all loads before the first use.
  if (row.residual) for_each_held([&](int h, int i) { more[h] = row.residual[i]; });
  for_each_held([&](int h, int i) { x_packs[h] = read_x(i); });
  if (row.residual) for_each_held([&](int h, int) { add(x_packs[h], more[h]); });
  for_each_held([&](int h, int) { square(x_packs[h]); });
  for (int i = threadIdx.x + kPacksPerThread * threads; i < packs; i += threads) square(read(i));

  const float scale = rsqrtf(block_sum(squares) / static_cast<float>(width) + eps);
  const auto normalized = [&](const P& pack, const P& factor) {
    float a[N], w[N];
    unpack(pack, a);
    unpack(factor, w);
#pragma unroll
    for (int n = 0; n < N; ++n) a[n] *= scale * w[n];
    return pack_of<T>(a);
  };
  // Call use(i, sum, result) for each pack of this thread; with whole_warps also for packs past the end, so that all
  // lanes take part.
  const auto each = [&](bool whole_warps, auto&& use) {
#pragma unroll
    for (int h = 0; h < kPacksPerThread; ++h) {
      const int i = static_cast<int>(threadIdx.x) + h * threads;
      if (whole_warps || i < packs) use(i, x_packs[h], i < packs ? normalized(x_packs[h], weights[h]) : P{});
    }
    for (int first = kPacksPerThread * threads; first < packs; first += threads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const P pack = i < packs ? read(i) : P{};
      if (whole_warps || i < packs) use(i, pack, i < packs ? normalized(pack, weight[i]) : P{});
    }
  };
  if constexpr (!kQuantized) {
    each(false, [&](int i, const P& pack, const P& result) {
      if (row.sum) row.sum[i] = pack;
      row.out[i] = result;
    });
  } else {
    constexpr int kLanes = kFp8Group / N;  // per group
    static_assert(kLanes <= kWarp);
    const auto pack_max = [](const P& result) {
      float a[N], max = 0;
      unpack(result, a);
#pragma unroll
      for (int n = 0; n < N; ++n) max = fmaxf(max, fabsf(a[n]));
      return max;
    };
    float row_scale = 0;
    if (!quantized.by_groups) {
      each(false, [&](int, const P&, const P& result) { row_scale = fmaxf(row_scale, pack_max(result)); });
      row_scale = fp8_scale(block_max(row_scale));
      if (threadIdx.x == 0) *quantized.scales = row_scale;
    }
    each(true, [&](int i, const P& pack, const P& result) {
      const float pack_scale = quantized.by_groups ? fp8_scale(lanes_max<kLanes>(pack_max(result))) : row_scale;
      if (i >= packs) return;
      if (quantized.by_groups && i % kLanes == 0) quantized.scales[i / kLanes * quantized.stride] = pack_scale;
      if (row.sum) row.sum[i] = pack;
      float a[N];
      unpack(result, a);
      Pack<Float8, N> out;
#pragma unroll
      for (int n = 0; n < N; ++n) out.x[n] = to_fp8(a[n], pack_scale);
      reinterpret_cast<Pack<Float8, N>*>(quantized.out)[i] = out;
    });
  }
}

// Call f.template operator()<N, kPacksPerThread>(threads per block): N elements per pack make 16 bytes if `vectorized`,
// else one element.
template <class T, class F>
void with_rms_norm_shape(const char* op, int64_t rows, int64_t width, bool vectorized, F&& f) {
  const auto with_packs = [&]<int N, int kPacksPerThread>() {
    const int64_t warps = (width / N + kPacksPerThread * kWarp - 1) / (kPacksPerThread * kWarp);
    f.template operator()<N, kPacksPerThread>(
        static_cast<unsigned>(std::min<int64_t>(warps * kWarp, kMaxRmsNormThreads)));
  };
  const auto with_pack = [&]<int N>() {
    const bool many = rows > 3 * current_device(op).num_sms;
    many ? with_packs.template operator()<N, 2>() : with_packs.template operator()<N, 1>();
  };
  vectorized ? with_pack.template operator()<16 / sizeof(T)>() : with_pack.template operator()<1>();
}

}  // namespace specdec::layers
