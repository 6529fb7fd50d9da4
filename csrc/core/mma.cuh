// Tensor-core multiplication by mma.sync (compute capability 8.0).
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "core/floats.h"

namespace specdec {

template <class T>
struct Mma;
template <>
struct Mma<BFloat16> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};
template <>
struct Mma<Half> : cute::SM80_16x8x16_F32F16F16F32_TN {};

// d += a b for a warp's fragments: A is 16 x 16, B is 16 x 8.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma<T>::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]);
}

// d += a b for fragments of tf32: A is 16 x 8, B is 8 x 8. The lowest 13 bits of a float do not count.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2],
                                           d[3]);
}

}  // namespace specdec
