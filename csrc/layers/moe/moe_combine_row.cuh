// What several experts made of a row, as one: the same sum, in the same order, wherever it is taken.
#pragma once

#include <cstdint>

#include "layers/pack.cuh"

namespace specdec::layers {

constexpr int kExpertsAtOnce = 8;  // whose packs are on their way together

// The sum in float32, by shares [taken], of the pack that `made` points to and those `stride` packs further each.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> combined(const Pack<T, N>* made, int64_t stride, const float* shares,
                                               int64_t taken) {
  float sum[N] = {};
  for (int64_t first = 0; first < taken; first += kExpertsAtOnce) {
    Pack<T, N> parts[kExpertsAtOnce];
    float part_shares[kExpertsAtOnce];
#pragma unroll
    for (int j = 0; j < kExpertsAtOnce; ++j) {
      if (first + j >= taken) break;
      parts[j] = made[(first + j) * stride];
      part_shares[j] = shares[first + j];
    }
#pragma unroll
    for (int j = 0; j < kExpertsAtOnce; ++j) {
      if (first + j >= taken) break;
      float part[N];
      unpack(parts[j], part);
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] += part_shares[j] * part[n];
    }
  }
  return pack_of<T>(sum);
}

}  // namespace specdec::layers
