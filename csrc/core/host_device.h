// SD_HD: marks small functions shared by a kernel and its CPU twin. SD_UNROLL unrolls a loop in one.
#pragma once

#include <type_traits>

#ifdef __CUDACC__
#define SD_HD __host__ __device__ __forceinline__
#else
#define SD_HD inline
#endif

#ifdef __CUDA_ARCH__
#define SD_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define SD_UNROLL
#else
#define SD_UNROLL _Pragma("GCC unroll 8")
#endif

namespace specdec {

// Return x clamped to [low, high].
template <class T>
SD_HD T clamp_to(T x, std::type_identity_t<T> low, std::type_identity_t<T> high) {
  return x < low ? low : x > high ? high : x;
}

// Return x + y, wrapped as GPUs add: for counts that a caller may have set to any value.
template <class T>
SD_HD T add_wrapped(T x, std::type_identity_t<T> y) {
  using Unsigned = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<Unsigned>(x) + static_cast<Unsigned>(y));
}

}  // namespace specdec
