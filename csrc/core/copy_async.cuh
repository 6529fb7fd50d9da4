// cp.async: asynchronous copies from global to shared memory.
#pragma once

#include "core/cuda.cuh"

namespace specdec {

// Start to copy 16 bytes. Wait by groups (cp.async.commit_group, cp.async.wait_group).
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from)
      : "memory");
}

}  // namespace specdec
