// Launching, and what every kernel file needs.
#pragma once

#include <cuda_runtime.h>

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

}  // namespace specdec
