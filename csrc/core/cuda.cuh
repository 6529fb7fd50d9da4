// Launching, and what every kernel file needs.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/dispatch.h"

namespace specdec {

// Throws CudaError, with the op's name and the place, unless `error` is cudaSuccess.
void check_cuda(cudaError_t error, const char* op, const char* file, int line);

#define SD_CUDA_CHECK(op, expression) ::specdec::check_cuda((expression), op, __FILE__, __LINE__)
// After every <<<>>>: without a GPU, or with a wrong configuration, only this call says so.
#define SD_LAUNCH_CHECK(op) SD_CUDA_CHECK(op, cudaGetLastError())

// The x of a launch's grid, for a number of blocks > 0 that the caller's sizes made. Throws ValueError beyond
// kMaxGridX.
unsigned grid_x(const char* op, int64_t blocks);

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// How launch() starts a kernel.
struct LaunchShape {
  dim3 grid, threads;
  size_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;     // blocks of a cluster, along x; more than 1 needs compute capability 9.0
};

// Starts a kernel that may be set up while the one before it on the stream still runs (programmatic dependent launch):
// in a chain of kernels this short, starting is most of the time. The kernel must call begin_kernel() first.
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

// The first statement of a kernel started by launch(): lets the next kernel be set up, then waits until every kernel
// before this one has finished and its writes are visible. Nothing of the caller's is read or written before.
__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// The other way round: the next kernel is set up only when every kernel before this one has finished. It may then read,
// before its own wait_for_kernels_before(), whatever this kernel does not write.
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

// A number that the compiler computes once, rather than wherever it is used.
__device__ __forceinline__ int hold(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Asks for the line in the L2. Nothing is read: who writes it afterwards meets it there.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace specdec
