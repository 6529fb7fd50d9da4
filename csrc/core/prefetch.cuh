// Asking memory ahead.
#pragma once

namespace specdec {

// Asks the line into the L2. Nothing is read: who writes it afterwards meets it there.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace specdec
