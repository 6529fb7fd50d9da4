// TMA tensor maps (compute capability 9.0).
#pragma once

#include <cuda.h>

#include "core/cuda.cuh"
#include "core/errors.h"

namespace specdec {

// Return the driver's cuTensorMapEncodeTiled, looked up at run time because the module does not link the driver. Null
// if the driver lacks it.
inline auto tensor_map_encoder(const char* op) {
  static const auto encode = [op] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    SD_CUDA_CHECK(
        op, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encode;
}

// Return the tensor map of 16-bit, 8-bit or float32 elements. A TMA copy writes a box as panels of 128 bytes per row,
// swizzled as wgmma reads them (float32: not swizzled), with zeros outside the tensor. Strides are in bytes, for all
// dimensions but the first.
template <int kDims>
CUtensorMap tensor_map(const char* op, const void* data, Dtypes dtype, const cuuint64_t (&sizes)[kDims],
                       const cuuint64_t (&strides)[kDims - 1], const cuuint32_t (&box)[kDims]) {
  const auto encode = tensor_map_encoder(op);
  if (encode == nullptr)
    throw CudaError(std::string(op) + ": the driver has no cuTensorMapEncodeTiled, expected CUDA 12");
  CUtensorMap map;
  const cuuint32_t step[] = {1, 1, 1, 1, 1};
  const auto type = dtype == kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : dtype == kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                    : dtype == kFloat32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                        : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto swizzle = dtype == kFloat32 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
  if (encode(&map, type, kDims, const_cast<void*>(data), sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw CudaError(std::string(op) + ": the driver refused to describe a tensor");
  return map;
}

}  // namespace specdec
