// Decays, and arithmetic of four elements.
#pragma once

#include "core/cuda.cuh"

namespace specdec::recurrent {

// Return the decay from one token to a later one, given the sums of log decays up to each; at most 1.
__device__ __forceinline__ float decay(float later, float earlier) { return expf(fminf(later - earlier, 0.0f)); }

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 scaled(float4 a, float f) { return make_float4(a.x * f, a.y * f, a.z * f, a.w * f); }
__device__ __forceinline__ float4 exp4(float4 a) { return make_float4(expf(a.x), expf(a.y), expf(a.z), expf(a.w)); }
__device__ __forceinline__ float4 decay4(float4 later, float4 earlier) {
  return make_float4(decay(later.x, earlier.x), decay(later.y, earlier.y), decay(later.z, earlier.z),
                     decay(later.w, earlier.w));
}
__device__ __forceinline__ void add_scaled(float4& to, float4 a, float f) {
  to.x += a.x * f;
  to.y += a.y * f;
  to.z += a.z * f;
  to.w += a.w * f;
}

}  // namespace specdec::recurrent
