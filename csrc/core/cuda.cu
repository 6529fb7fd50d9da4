#include "core/cluster.cuh"
#include "core/errors.h"

namespace specdec {

void check_cuda(cudaError_t error, const char* op, const char* file, int line) {
  if (error == cudaSuccess) return;
  std::string message =
      std::string(op) + ": CUDA error \"" + cudaGetErrorString(error) + "\" at " + file + ":" + std::to_string(line);
  if (error == cudaErrorNoKernelImageForDevice)
    message += " (this build has kernels for " SPECDEC_CUDA_ARCHITECTURES ")";
  throw CudaError(message);
}

unsigned grid_x(const char* op, int64_t blocks) {
  if (blocks > kMaxGridX)
    throw ValueError(std::string(op) + ": the batch needs " + std::to_string(blocks) + " blocks, expected at most " +
                     std::to_string(kMaxGridX));
  return static_cast<unsigned>(blocks);
}

bool is_hopper_or_later(const char* op) {
  int device = 0, major = 0;
  SD_CUDA_CHECK(op, cudaGetDevice(&device));
  SD_CUDA_CHECK(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= 9;
}

unsigned cluster_size(const char* op, int64_t tasks, int blocks_per_sm, int64_t useful) {
  if (!is_hopper_or_later(op)) return 1;
  int device = 0, multiprocessors = 0;
  SD_CUDA_CHECK(op, cudaGetDevice(&device));
  SD_CUDA_CHECK(op, cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const int64_t blocks = static_cast<int64_t>(multiprocessors) * blocks_per_sm;
  unsigned size = 1;
  while (size < kMaxCluster && 2 * size <= useful && 2 * size * tasks <= blocks) size *= 2;
  return size;
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  SD_CUDA_CHECK("device guard", cudaGetDevice(&current));
  if (current == device) return;
  SD_CUDA_CHECK("device guard", cudaSetDevice(device));
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace specdec
