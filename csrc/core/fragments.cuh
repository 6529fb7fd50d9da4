// Fragments of mma.sync: loads by ldmatrix, and pairs of 16-bit elements in a register.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "core/cuda.cuh"
#include "core/floats.h"

namespace specdec {

// Load four matrices of 8 x 8 elements of 16 bits. Lanes 8 n to 8 n + 7 give the addresses of matrix n's rows; a lane
// receives elements 2 (lane % 4) and the next of row lane / 4, of each matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), to[0], to[1], to[2], to[3]);
}

// The same for two matrices, and lanes 0 to 15.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[2], const void* row) {
  cute::SM75_U32x2_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), to[0], to[1]);
}

// As for four matrices, for the transposed ones: a lane receives elements lane / 4 of rows 2 (lane % 4) and the next.
__device__ __forceinline__ void load_transposed_matrices(uint32_t (&to)[4], const void* row) {
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(row), to[0], to[1], to[2], to[3]);
}

// Return two bfloat16 values in a register, `low` in the lower half.
__device__ __forceinline__ uint32_t bfloat16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float low_of_pair(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of_pair(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

}  // namespace specdec
