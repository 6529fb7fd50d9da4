#include "core/cuda.cuh"
#include "round/shared_memory.h"

namespace specdec::round {

void* device_address(void* host) {
  cudaPointerAttributes attributes{};
  SD_CUDA_CHECK("pinned memory", cudaPointerGetAttributes(&attributes, host));
  return attributes.type == cudaMemoryTypeHost ? attributes.devicePointer : nullptr;
}

}  // namespace specdec::round
