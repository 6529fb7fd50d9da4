#include <cstring>
#include <vector>

#include "core/cuda.cuh"
#include "core/errors.h"
#include "parallel/peer_memory.h"

namespace specdec::parallel {
namespace {

constexpr const char* kName = "PeerMemory";

}  // namespace

PeerMemory::PeerMemory(int device, int64_t words, uint32_t value) : device_(device), is_own_(true) {
  if (words < 1) throw ValueError("PeerMemory: words is " + std::to_string(words) + ", expected at least 1");
  const DeviceGuard guard(device);
  const std::vector<uint32_t> values(static_cast<size_t>(words), value);
  const size_t bytes = values.size() * sizeof(uint32_t);
  SD_CUDA_CHECK(kName, cudaMalloc(&memory_, bytes));
  SD_CUDA_CHECK(kName, cudaMemcpy(memory_, values.data(), bytes, cudaMemcpyHostToDevice));
  SD_CUDA_CHECK(kName, cudaDeviceSynchronize());
}

PeerMemory::PeerMemory(int device, std::string_view handle) : device_(device), is_own_(false) {
  cudaIpcMemHandle_t opened;
  if (handle.size() != sizeof opened)
    throw ValueError("PeerMemory: handle has " + std::to_string(handle.size()) + " bytes, expected " +
                     std::to_string(sizeof opened));
  std::memcpy(&opened, handle.data(), sizeof opened);
  const DeviceGuard guard(device);
  const cudaError_t error = cudaIpcOpenMemHandle(&memory_, opened, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) cudaGetLastError();  // the next call shall not find it
  SD_CUDA_CHECK(kName, error);
}

PeerMemory::~PeerMemory() { close(); }

std::string PeerMemory::handle() const {
  if (!is_own_ || memory_ == nullptr)
    throw ValueError("PeerMemory: handle is asked of memory that is mapped or closed, expected its owner's");
  const DeviceGuard guard(device_);
  cudaIpcMemHandle_t handle;
  SD_CUDA_CHECK(kName, cudaIpcGetMemHandle(&handle, memory_));
  return {reinterpret_cast<const char*>(&handle), sizeof handle};
}

void PeerMemory::close() {
  if (memory_ == nullptr) return;
  // No exception: a device that has failed keeps nothing, and a destructor calls this.
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && cudaSetDevice(device_) == cudaSuccess) {
    is_own_ ? cudaFree(memory_) : cudaIpcCloseMemHandle(memory_);
    cudaSetDevice(current);
  }
  cudaGetLastError();
  memory_ = nullptr;
}

}  // namespace specdec::parallel
