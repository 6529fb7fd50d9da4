// Kernel launches with programmatic dependent launch (PDL), error checks, and constants that every kernel file needs.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/dispatch.h"

namespace specdec {

// Throw CudaError, with the op's name and the source location, unless `error` is cudaSuccess.
void check_cuda(cudaError_t error, const char* op, const char* file, int line);

#define SD_CUDA_CHECK(op, expression) ::specdec::check_cuda((expression), op, __FILE__, __LINE__)
// Use after every <<<>>>: only this call reports a missing GPU or a wrong launch configuration.
#define SD_LAUNCH_CHECK(op) SD_CUDA_CHECK(op, cudaGetLastError())

// Return a launch's grid.x for `blocks` > 0, which depends on the caller's sizes. Throws ValueError above kMaxGridX.
unsigned grid_x(const char* op, int64_t blocks);

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// The launch configuration of a kernel.
struct LaunchShape {
  dim3 grid, threads;
  size_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;     // blocks per cluster, along x; more than 1 requires compute capability 9.0
};

// Launch a kernel that may be set up while the previous one on the stream still runs (programmatic dependent launch):
// in a chain of kernels this short, launch latency is most of the time. The kernel must call begin_kernel() first.
template <class... Params>
void launch(const char* op, void (*kernel)(Params...), const LaunchShape& shape, Stream stream,
            const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{.gridDim = shape.grid,
                            .blockDim = shape.threads,
                            .dynamicSmemBytes = shape.shared_bytes,
                            .stream = stream,
                            .attrs = attributes,
                            .numAttrs = 0};
  if (current_device(op).is_hopper_or_later) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = shape.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  SD_CUDA_CHECK(op, cudaLaunchKernelEx(&config, kernel, params...));
}

// Let the next kernel be set up, then wait until all previous kernels have finished and their writes are visible. The
// first statement of a kernel started by launch(); nothing of the caller's is read or written before it.
__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// The two halves of begin_kernel(). A kernel that waits first lets the next one be set up only when all previous
// kernels have finished; the next kernel may then read, before its own wait, whatever this kernel does not write.
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Wait at one of a block's 16 barriers for kThreads threads, whole warps. __syncthreads() is barrier 0.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Return x as an opaque value, so that the compiler computes it once instead of at each use.
__device__ __forceinline__ int hold(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Return a pointer to shared memory as an opaque value, so that the compiler keeps it instead of computing it at each
// use. Called by a whole warp.
template <class T>
__device__ __forceinline__ T* hold_shared(T* x) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(x));
  return static_cast<T*>(__cvta_shared_to_generic(__shfl_sync(kFullMask, address, 0)));
}

// Prefetch a cache line into L2. Nothing is read, so a later write hits it there.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace specdec
