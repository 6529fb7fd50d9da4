// One block a row, whose threads hold what they read until the sum of squares is known. Reads x, residual and the
// weight and writes sum and result once, the reads all on their way before one is looked at. With few rows it is
// latency that counts, and a thread has one 16-byte read of each; with many, fewer threads with two wait less for each
// other. Registers are kept so few that a multiprocessor has 1024 threads or more.
#include <algorithm>

#include "core/cuda.cuh"
#include "layers/norm_rows.h"
#include "layers/pack.cuh"

namespace specdec {
namespace {

constexpr int kMaxThreads = 512;

__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[kMaxThreads / kWarp];
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = threadIdx.x % kWarp < blockDim.x / kWarp ? sums[threadIdx.x % kWarp] : 0;
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

// kHeld: packs that a thread holds; the others of longer rows are read twice.
template <class T, int N, int kHeld>
__global__ void __launch_bounds__(kMaxThreads, kHeld == 1 ? 3 : 2) norm_rows_kernel(NormRowsParams p) {
  using P = Pack<T, N>;
  begin_kernel();
  const int64_t row = blockIdx.x;
  const auto* x = reinterpret_cast<const P*>(static_cast<const T*>(p.x) + row * p.x_stride);
  const auto* residual = reinterpret_cast<const P*>(static_cast<const T*>(p.residual) + row * p.residual_stride);
  auto* sum = reinterpret_cast<P*>(static_cast<T*>(p.out_sum) + row * p.sum_stride);
  auto* out = reinterpret_cast<P*>(static_cast<T*>(p.out) + row * p.out_stride);
  const auto* weight = static_cast<const P*>(p.weight);
  const int packs = static_cast<int>(p.width / N), threads = static_cast<int>(blockDim.x);

  // The sum as it is stored, which is what is normalised.
  const auto add = [](P& value, const P& more) {
    float a[N], b[N];
    unpack(value, a);
    unpack(more, b);
#pragma unroll
    for (int n = 0; n < N; ++n) a[n] += b[n];
    value = pack_of<T>(a);
  };
  const auto read = [&](int i) {
    P value = x[i];
    if (p.residual) add(value, residual[i]);
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
  P held[kHeld], more[kHeld], weights[kHeld];
  const auto each_held = [&](auto&& use) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int i = static_cast<int>(threadIdx.x) + h * threads;
      if (i < packs) use(h, i);
    }
  };
  each_held([&](int h, int i) { held[h] = x[i]; });
  if (p.residual) each_held([&](int h, int i) { more[h] = residual[i]; });
  each_held([&](int h, int i) { weights[h] = weight[i]; });
  if (p.residual) each_held([&](int h, int) { add(held[h], more[h]); });
  each_held([&](int h, int) { square(held[h]); });
  for (int i = threadIdx.x + kHeld * threads; i < packs; i += threads) square(read(i));

  const float scale = rsqrtf(block_sum(squares) / static_cast<float>(p.width) + p.eps);
  const auto write = [&](int i, const P& pack, const P& factor) {
    float a[N], w[N];
    unpack(pack, a);
    unpack(factor, w);
#pragma unroll
    for (int n = 0; n < N; ++n) a[n] *= scale * w[n];
    if (p.residual) sum[i] = pack;
    out[i] = pack_of<T>(a);
  };
  each_held([&](int h, int i) { write(i, held[h], weights[h]); });
  for (int i = threadIdx.x + kHeld * threads; i < packs; i += threads) write(i, read(i), weight[i]);
}

}  // namespace

void norm_rows_cuda(const NormRowsParams& p, Stream stream) {
  with_float_type(p.dtype, [&]<class T>() {
    const auto start = [&]<int N, int kHeld>() {
      const int64_t warps = (p.width / N + kHeld * kWarp - 1) / (kHeld * kWarp);
      const auto threads = static_cast<unsigned>(std::min<int64_t>(warps * kWarp, kMaxThreads));
      launch("norm_rows", norm_rows_kernel<T, N, kHeld>, {.grid = grid_x("norm_rows", p.rows), .threads = threads},
             stream, p);
    };
    const auto of_pack = [&]<int N>() {
      const bool many = p.rows > 3 * current_device("norm_rows").multiprocessors;
      many ? start.template operator()<N, 2>() : start.template operator()<N, 1>();
    };
    p.wide ? of_pack.template operator()<16 / sizeof(T)>() : of_pack.template operator()<1>();
  });
}

}  // namespace specdec
