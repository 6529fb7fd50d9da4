#pragma once

#include "core/cuda.cuh"

namespace specdec {

// Of the lanes up to this one.
template <class T>
__device__ __forceinline__ T sum_up_to_lane(T x) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T before = __shfl_up_sync(kFullMask, x, step);
    if (static_cast<int>(threadIdx.x) % kWarp >= step) x += before;
  }
  return x;
}

}  // namespace specdec
