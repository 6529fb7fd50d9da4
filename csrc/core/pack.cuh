// Pack: adjacent elements of a row, read and written by one vectorized access.
#pragma once

#include "core/floats.h"

namespace specdec {

template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T x[N];
};

template <class T, int N>
__device__ __forceinline__ void unpack(const Pack<T, N>& pack, float (&values)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = to_float(pack.x[n]);
}

template <class T, int N>
__device__ __forceinline__ Pack<T, N> pack_of(const float (&values)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int n = 0; n < N; ++n) pack.x[n] = from_float<T>(values[n]);
  return pack;
}

}  // namespace specdec
