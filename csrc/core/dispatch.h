// Dispatch from a checked call to the CPU or CUDA half of an op.
//
// An op <op> declares, in <op>.h, `void <op>_cpu(const Params&)` and `void <op>_cuda(const Params&, Stream)`; its
// <op>.cpp ends in SD_DISPATCH(check, stream, <op>, params). A build without nvcc has no CUDA half and raises an error.
#pragma once

#include "core/check.h"
#include "core/device.h"

struct CUstream_st;  // cudaStream_t is a pointer to this

namespace specdec {

using Stream = CUstream_st*;

// Maximum grid dimensions. Ops check grid.y against kMaxGridY; grid_x (cuda.cuh) checks grid.x.
constexpr int64_t kMaxGridX = INT32_MAX, kMaxGridY = 65535;

// Makes a device current for a scope (CUDA builds only).
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

[[noreturn]] void throw_no_cuda(const Check& check);

// Return the GPU that the tensors of a call are on; throws if this build has no CUDA kernels.
Device device_of(const Check& check);

}  // namespace specdec

#ifdef SPECDEC_WITH_CUDA
#define SD_RUN_CUDA(check, call_stream, op, params)                                 \
  {                                                                                 \
    ::specdec::DeviceGuard guard((check).device().device_id);                       \
    op##_cuda(params, static_cast<::specdec::Stream>((check).stream(call_stream))); \
  }
#else
#define SD_RUN_CUDA(check, call_stream, op, params) \
  {                                                 \
    static_cast<void>(call_stream);                 \
    ::specdec::throw_no_cuda(check);                \
  }
#endif

#define SD_DISPATCH(check, call_stream, op, params) \
  do {                                              \
    if ((check).on_cuda())                          \
      SD_RUN_CUDA(check, call_stream, op, params)   \
    else                                            \
      op##_cpu(params);                             \
  } while (0)
