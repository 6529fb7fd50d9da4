// One row over its root mean square, by a block, whose threads hold what they read until the sum of squares is known,
// the reads all on their way before one is looked at. With few rows it is latency that counts, and a thread has one
// 16-byte read of each; with many, fewer threads with two wait less for each other. Registers are kept so few that a
// multiprocessor has 1024 threads or more, unless x is what several experts made. No kernel writes the weight, so that
// it is on its way before those before this one have finished.
#pragma once

#include <algorithm>

#include "core/warp.cuh"
#include "layers/moe/moe_combine_row.cuh"
#include "layers/quant/quantize_fp8.h"

namespace specdec::layers {

constexpr int kMaxNormThreads = 512;
// Blocks that a multiprocessor has room for, of threads that hold so many packs.
template <int kHeld, bool kShared = false>
constexpr int kNormBlocks = kShared      ? 1
                            : kHeld == 1 ? 3
                                         : 2;

template <class P>
struct NormRow {
  const P *x, *residual;  // residual: null, or added to x
  P* sum;                 // null, or what is normalised
  P* out;                 // null where the result is rounded
  const float* shares;    // by which so many rows of x, so many packs apart, are summed first
  int64_t taken, x_stride;
};

// The result as numbers of 8 bits, with a scale for each kRoundGroup of them or one for all.
struct RoundedRow {
  Float8* numbers;
  float* scales;
  int64_t stride;  // of groups
  bool by_groups;
};

__device__ __forceinline__ float norm_block_sum(float x) {
  __shared__ float sums[kMaxNormThreads / kWarp];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = threadIdx.x % kWarp < blockDim.x / kWarp ? sums[threadIdx.x % kWarp] : 0;
  return warp_sum(x);
}

// The largest of so many neighbouring lanes, numbers of 0 and more.
template <int kLanes>
__device__ __forceinline__ float largest_of_lanes(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
  return x;
}
__device__ __forceinline__ float norm_block_largest(float x) {
  __shared__ float of_warps[kMaxNormThreads / kWarp];
  x = largest_of_lanes<kWarp>(x);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  return largest_of_lanes<kWarp>(threadIdx.x % kWarp < blockDim.x / kWarp ? of_warps[threadIdx.x % kWarp] : 0);
}

// The first statement of a kernel. find(): the block's NormRow, asked for when the kernels before this one have
// finished. kHeld: packs that a thread holds; the others of longer rows are read twice. kShared: whether x has shares.
template <class T, int N, int kHeld, bool kRounded = false, bool kShared = false, class Find>
__device__ __forceinline__ void norm_row(const Pack<T, N>* weight, int width, float eps, Find&& find,
                                         const RoundedRow& rounded = {}) {
  using P = Pack<T, N>;
  const int packs = width / N, threads = static_cast<int>(blockDim.x);
  P held[kHeld], more[kHeld], weights[kHeld];
  const auto each_held = [&](auto&& use) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int i = static_cast<int>(threadIdx.x) + h * threads;
      if (i < packs) use(h, i);
    }
  };
  each_held([&](int h, int i) { weights[h] = weight[i]; });
  begin_kernel();
  const NormRow<P> row = find();

  // The sum as it is stored, which is what is normalised.
  const auto add = [](P& value, const P& more) {
    float a[N], b[N];
    unpack(value, a);
    unpack(more, b);
#pragma unroll
    for (int n = 0; n < N; ++n) a[n] += b[n];
    value = pack_of<T>(a);
  };
  const auto read_x = [&](int i) {
    if constexpr (kShared)
      return combined(row.x + i, row.x_stride, row.shares, row.taken);
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
  // All that is held is on its way before any of it is looked at.
  if (row.residual) each_held([&](int h, int i) { more[h] = row.residual[i]; });
  each_held([&](int h, int i) { held[h] = read_x(i); });
  if (row.residual) each_held([&](int h, int) { add(held[h], more[h]); });
  each_held([&](int h, int) { square(held[h]); });
  for (int i = threadIdx.x + kHeld * threads; i < packs; i += threads) square(read(i));

  const float scale = rsqrtf(norm_block_sum(squares) / static_cast<float>(width) + eps);
  const auto normed = [&](const P& pack, const P& factor) {
    float a[N], w[N];
    unpack(pack, a);
    unpack(factor, w);
#pragma unroll
    for (int n = 0; n < N; ++n) a[n] *= scale * w[n];
    return pack_of<T>(a);
  };
  // Calls use(i, sum, result) with the packs of this thread; or with all of a warp, those behind the last as well.
  const auto each = [&](bool whole_warps, auto&& use) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int i = static_cast<int>(threadIdx.x) + h * threads;
      if (whole_warps || i < packs) use(i, held[h], i < packs ? normed(held[h], weights[h]) : P{});
    }
    for (int first = kHeld * threads; first < packs; first += threads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const P pack = i < packs ? read(i) : P{};
      if (whole_warps || i < packs) use(i, pack, i < packs ? normed(pack, weight[i]) : P{});
    }
  };
  if constexpr (!kRounded) {
    each(false, [&](int i, const P& pack, const P& result) {
      if (row.sum) row.sum[i] = pack;
      row.out[i] = result;
    });
  } else {
    constexpr int kLanes = kRoundGroup / N;  // that hold a group
    static_assert(kLanes <= kWarp);
    const auto largest_of = [](const P& result) {
      float a[N], largest = 0;
      unpack(result, a);
#pragma unroll
      for (int n = 0; n < N; ++n) largest = fmaxf(largest, fabsf(a[n]));
      return largest;
    };
    float of_row = 0;
    if (!rounded.by_groups) {
      each(false, [&](int, const P&, const P& result) { of_row = fmaxf(of_row, largest_of(result)); });
      of_row = scale_of(norm_block_largest(of_row));
      if (threadIdx.x == 0) *rounded.scales = of_row;
    }
    each(true, [&](int i, const P& pack, const P& result) {
      const float scale_of_pack = rounded.by_groups ? scale_of(largest_of_lanes<kLanes>(largest_of(result))) : of_row;
      if (i >= packs) return;
      if (rounded.by_groups && i % kLanes == 0) rounded.scales[i / kLanes * rounded.stride] = scale_of_pack;
      if (row.sum) row.sum[i] = pack;
      float a[N];
      unpack(result, a);
      Pack<Float8, N> numbers;
#pragma unroll
      for (int n = 0; n < N; ++n) numbers.x[n] = scaled(a[n], scale_of_pack);
      reinterpret_cast<Pack<Float8, N>*>(rounded.numbers)[i] = numbers;
    });
  }
}

// Calls f.template operator()<N, kHeld>(threads of a block), for `rows` rows in packs of 16 bytes where they are
// `wide`, else of one number.
template <class T, class F>
void with_norm_threads(const char* op, int64_t rows, int64_t width, bool wide, F&& f) {
  const auto of_held = [&]<int N, int kHeld>() {
    const int64_t warps = (width / N + kHeld * kWarp - 1) / (kHeld * kWarp);
    f.template operator()<N, kHeld>(static_cast<unsigned>(std::min<int64_t>(warps * kWarp, kMaxNormThreads)));
  };
  const auto of_pack = [&]<int N>() {
    const bool many = rows > 3 * current_device(op).num_sms;
    many ? of_held.template operator()<N, 2>() : of_held.template operator()<N, 1>();
  };
  wide ? of_pack.template operator()<16 / sizeof(T)>() : of_pack.template operator()<1>();
}

}  // namespace specdec::layers
