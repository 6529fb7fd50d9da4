// Lane and warp indices, and warp-wide reductions and scans.
#pragma once

#include "core/cuda.cuh"

namespace specdec {

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarp; }

// Return the sum over all lanes, in every lane.
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
  constexpr uint32_t kLow = (1u << 22) - 1;  // a sum of 32 values of 22 bits fits a word
  const uint64_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x) & kLow);
  const uint64_t middle = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 22) & kLow);
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 44));
  return low + (middle << 22) + (high << 44);
}

// Return the maximum over all lanes, in every lane.
__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
  const uint32_t high = __reduce_max_sync(kFullMask, static_cast<uint32_t>(x >> 32));
  const uint32_t low = __reduce_max_sync(kFullMask, x >> 32 == high ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

// Return the inclusive prefix sum over lanes.
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
