// A number that the compiler has to keep.
#pragma once

namespace specdec {

// Computed once, not wherever it is used.
__device__ __forceinline__ int hold(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace specdec
