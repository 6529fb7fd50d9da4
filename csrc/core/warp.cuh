// A thread's place in its block, and what the lanes of a warp find out together.
#pragma once

#include "core/cuda.cuh"

namespace specdec {

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarp; }

// The sum over all lanes, which each of them gets.
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
  constexpr uint32_t kLow = (1u << 22) - 1;  // 32 numbers of 22 bits fit a word
  const uint64_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x) & kLow);
  const uint64_t middle = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 22) & kLow);
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 44));
  return low + (middle << 22) + (high << 44);
}

// The largest number of all lanes, which each of them gets.
__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
  const uint32_t high = __reduce_max_sync(kFullMask, static_cast<uint32_t>(x >> 32));
  const uint32_t low = __reduce_max_sync(kFullMask, x >> 32 == high ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

// The sum over the lanes up to this one.
template <class T>
__device__ __forceinline__ T sum_up_to_lane(T x) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T before = __shfl_up_sync(kFullMask, x, step);
    if (lane_id() >= step) x += before;
  }
  return x;
}

}  // namespace specdec
