// SerialRows (row_draws.h) with a block of threads; every thread gets every result.
//
// The row is split into one part per warp; each warp sums its part, and the part that contains the draw is split again,
// down to a single entry: the row is read once, then 1/32 of it, then 1/1024.
#pragma once

#include "compat/row_draws.h"
#include "core/cuda.cuh"

namespace specdec::compat {

class BlockRows {
 public:
  static constexpr int kWarps = 32, kThreads = kWarps * kWarp;
  using Storage = uint64_t[kWarps];  // in smem

  __device__ explicit BlockRows(Storage& storage) : warp_sums_(storage) {}

  template <class Row>
  __device__ uint64_t total(const Row& row, int64_t vocab) {
    sum_parts(row, 0, vocab, part_length(vocab));
    uint64_t sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += warp_sums_[w];
    return sum;
  }

  template <class Row>
  __device__ int64_t draw(const Row& row, int64_t vocab, float coin) {
    uint64_t left = total(row, vocab);
    if (left == 0) return -1;
    left = share_of(coin, left);
    int64_t begin = 0, end = vocab;
    while (true) {  // the entry is in [begin, end), whose parts are summed
      const int64_t length = part_length(end - begin);
      int w = 0;
      for (; w < kWarps - 1 && warp_sums_[w] <= left; ++w) left -= warp_sums_[w];
      begin += w * length;
      end = min(begin + length, end);
      if (length == 1) return begin;
      sum_parts(row, begin, end, part_length(end - begin));
    }
  }

  __device__ bool writes() const { return threadIdx.x == 0; }
  // Wait until the other threads see the writes of the writing thread.
  __device__ void wait_for_writes() const { __syncthreads(); }

 private:
  __device__ static int64_t part_length(int64_t size) { return (size + kWarps - 1) / kWarps; }

  // Set warp_sums_[w] to the sum of the w-th part of [begin, end).
  template <class Row>
  __device__ void sum_parts(const Row& row, int64_t begin, int64_t end, int64_t length) {
    const int64_t first = begin + static_cast<int64_t>(threadIdx.x / kWarp) * length, last = min(first + length, end);
    uint64_t sum = 0;
#pragma unroll 8
    for (int64_t v = first + threadIdx.x % kWarp; v < last; v += kWarp) sum += row.weight(v);
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    publish(sum);
  }

  // Publish every warp's value, after all threads have read the previous ones.
  __device__ void publish(uint64_t of_warp) {
    __syncthreads();
    if (threadIdx.x % kWarp == 0) warp_sums_[threadIdx.x / kWarp] = of_warp;
    __syncthreads();
  }

  Storage& warp_sums_;
};

}  // namespace specdec::compat
