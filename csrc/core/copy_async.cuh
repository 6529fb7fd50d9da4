// cp.async: asynchronous copies from global to shared memory.
#pragma once

#include "core/cuda.cuh"

namespace specdec {

// Start to copy 16 bytes. Wait by groups (commit_copies, wait_for_copies).
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from)
      : "memory");
}

// Start to copy 16 bytes, or to write zeros; `from` is a valid address in either case.
__device__ __forceinline__ void copy_async_or_zeros(void* to, const void* from, bool copies) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(copies ? 16 : 0)
               : "memory");
}

// The same for a float.
__device__ __forceinline__ void copy_async_or_zeros(float* to, const float* from, bool copies) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(copies ? 4 : 0)
      : "memory");
}

// Start to copy 4, 8 or 16 bytes.
template <int kBytes>
__device__ __forceinline__ void copy_bytes_async(void* to, const void* from) {
  if constexpr (kBytes == 16)
    copy_async(to, from);
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "n"(kBytes)
                 : "memory");
}

// End a group of the thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until no more than kGroups of the thread's groups are under way.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace specdec
