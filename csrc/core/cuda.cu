#include <mutex>
#include <string_view>

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

namespace {

Device describe(const char* op, int device) {
  constexpr bool kBuiltForWgmma = std::string_view(SPECDEC_CUDA_ARCHITECTURES).find("90a") != std::string_view::npos;
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    SD_CUDA_CHECK(op, cudaDeviceGetAttribute(&value, which, device));
    return value;
  };
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  return {.num_sms = attribute(cudaDevAttrMultiProcessorCount),
          .is_hopper_or_later = major >= 9,
          .has_wgmma = kBuiltForWgmma && major == 9,
          .shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
}

}  // namespace

Device current_device(const char* op) {
  // Query each device once: an op needs the answer twice, and each attribute costs 30 ns.
  constexpr int kRemembered = 64;
  static std::once_flag asked[kRemembered];
  static Device remembered[kRemembered];
  int device = 0;
  SD_CUDA_CHECK(op, cudaGetDevice(&device));
  if (device >= kRemembered) return describe(op, device);
  std::call_once(asked[device], [&] { remembered[device] = describe(op, device); });
  return remembered[device];
}

unsigned cluster_size(const char* op, int64_t tasks, int blocks_per_sm, int64_t useful) {
  const Device device = current_device(op);
  if (!device.is_hopper_or_later) return 1;
  const int64_t blocks = static_cast<int64_t>(device.num_sms) * blocks_per_sm;
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
