// Reads the clock of the device that runs a round.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include <chrono>
#endif

namespace specdec::round {

#ifdef __CUDACC__
__device__ __forceinline__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
#else
inline int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
#endif

}  // namespace specdec::round
