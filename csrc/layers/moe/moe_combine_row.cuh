// The weighted sum of a row's expert outputs, in the same order in every kernel that fuses it.
#pragma once

#include <cstdint>

#include "core/pack.cuh"

namespace specdec::layers {

constexpr int kExpertsInFlight = 8;  // packs loaded together

// Return the weighted sum, in float32, of top_k packs that are `stride` packs apart.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> combine_pack(const Pack<T, N>* expert_outputs, int64_t stride,
                                                   const float* topk_weights, int64_t top_k) {
  float sum[N] = {};
  for (int64_t first = 0; first < top_k; first += kExpertsInFlight) {
    Pack<T, N> parts[kExpertsInFlight];
    float part_weights[kExpertsInFlight];
#pragma unroll
    for (int j = 0; j < kExpertsInFlight; ++j) {
      if (first + j >= top_k) break;
      parts[j] = expert_outputs[(first + j) * stride];
      part_weights[j] = topk_weights[first + j];
    }
#pragma unroll
    for (int j = 0; j < kExpertsInFlight; ++j) {
      if (first + j >= top_k) break;
      float part[N];
      unpack(parts[j], part);
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] += part_weights[j] * part[n];
    }
  }
  return pack_of<T>(sum);
}

}  // namespace specdec::layers
