// all_reduce, all_gather and all_reduce_add_rms_norm on a GPU: one-shot push. Every rank writes all its packs to all
// others and adds what it receives in the order of ranks, so that all get the same bits.
//
// A call moves (size - 1) * bytes in each direction over NVLink, and is bound by one latency of it up to some 128 KiB.
// With the norm, one block per row (rms_norm_row.cuh) receives the row instead of reading it.
#include <algorithm>

#include "layers/norm/rms_norm_row.cuh"
#include "parallel/all_reduce.h"
#include "parallel/exchange.cuh"

namespace specdec::parallel {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 264;  // at most: all of them run at once

template <class T, int kSize, bool kGather>
__global__ void __launch_bounds__(kThreads, 2) exchange_kernel(AllReduceParams p) {
  Exchange<kSize> exchange(p.exchange);
  begin_kernel();
  exchange.begin();
  const int64_t per_row = p.exchange.width * static_cast<int64_t>(sizeof(T)) / kPackBytes;
  const int64_t packs = p.exchange.rows * per_row, step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < packs; i += step) exchange.push(i);
  exchange.empty_phase_before();
  for (int64_t i = first; i < packs; i += step) {
    if constexpr (kGather) {
      uint4 received[kSize];
      exchange.wait_for(i, received);
      uint4* const row = static_cast<uint4*>(p.out) + i / per_row * kSize * per_row + i % per_row;
#pragma unroll
      for (int r = 0; r < kSize; ++r) row[r * per_row] = without_negative_zeros(received[r]);
    } else {
      static_cast<Pack<T, kPackBytes / sizeof(T)>*>(p.out)[i] = exchange.template sum<T>(i);
    }
  }
  __syncthreads();  // all threads have begun
  if (threadIdx.x == 0) exchange.finish(packs);
}

template <bool kGather>
void start_exchange(const char* op, const AllReduceParams& p, Stream stream) {
  with_float_type(p.exchange.dtype, [&]<class T>() {
    const int64_t packs = p.exchange.rows * p.exchange.width * static_cast<int64_t>(sizeof(T)) / kPackBytes;
    const auto blocks = static_cast<unsigned>(std::min((packs + kThreads - 1) / kThreads, kBlocks));
    with_size(p.exchange.size, [&]<int kSize>() {
      launch(op, exchange_kernel<T, kSize, kGather>, {.grid = blocks, .threads = kThreads}, stream, p);
    });
  });
}

// A row that rms_norm_row receives from the ranks. Packs that it reads twice are still there.
template <class T, int kSize>
struct SummedRow {
  const Exchange<kSize>& exchange;
  int64_t first;
  __device__ __forceinline__ Pack<T, kPackBytes / sizeof(T)> operator[](int i) const {
    return exchange.template sum<T>(first + i);
  }
};

template <class T, int kSize>
struct ReducedRow {
  using P = Pack<T, kPackBytes / sizeof(T)>;
  SummedRow<T, kSize> x;
  const P* residual;
  P *sum, *out;
};

template <class T, int kSize, int kPacksPerThread>
__global__ void __launch_bounds__(layers::kMaxRmsNormThreads)
    all_reduce_add_rms_norm_kernel(AllReduceAddRmsNormParams p) {
  constexpr int N = kPackBytes / sizeof(T);
  using P = Pack<T, N>;
  Exchange<kSize> exchange(p.exchange);
  const int packs = static_cast<int>(p.exchange.width) / N;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * packs;
  const auto find = [&]() -> ReducedRow<T, kSize> {
    exchange.begin();
    for (int i = threadIdx.x; i < packs; i += blockDim.x) exchange.push(first + i);
    exchange.empty_phase_before();
    return {.x = {exchange, first},
            .residual = p.residual ? static_cast<const P*>(p.residual) + blockIdx.x * (p.residual_stride / N) : nullptr,
            .sum = static_cast<P*>(p.out_sum) + blockIdx.x * (p.sum_stride / N),
            .out = static_cast<P*>(p.out) + first};
  };
  layers::rms_norm_row<T, N, kPacksPerThread>(static_cast<const P*>(p.weight), static_cast<int>(p.exchange.width),
                                              p.eps, find);
  // The sum of squares has made all threads meet since they began.
  if (threadIdx.x == 0) exchange.finish(p.exchange.rows * packs);
}

}  // namespace

void all_reduce_cuda(const AllReduceParams& p, Stream stream) { start_exchange<false>("all_reduce", p, stream); }

void all_gather_cuda(const AllReduceParams& p, Stream stream) { start_exchange<true>("all_gather", p, stream); }

void all_reduce_add_rms_norm_cuda(const AllReduceAddRmsNormParams& p, Stream stream) {
  constexpr const char* kOp = "all_reduce_add_rms_norm";
  const ExchangeParams& x = p.exchange;
  with_float_type(x.dtype, [&]<class T>() {
    with_size(x.size, [&]<int kSize>() {
      layers::with_rms_norm_shape<T>(kOp, x.rows, x.width, true, [&]<int N, int kPacksPerThread>(unsigned threads) {
        if constexpr (N > 1)
          launch(kOp, all_reduce_add_rms_norm_kernel<T, kSize, kPacksPerThread>,
                 {.grid = grid_x(kOp, x.rows), .threads = threads}, stream, p);
      });
    });
  });
}

}  // namespace specdec::parallel
