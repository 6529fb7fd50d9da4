// A thread's place in its block.
#pragma once

#include "core/cuda.cuh"

namespace specdec {

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarp; }

}  // namespace specdec
