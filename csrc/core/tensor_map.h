// What the copy engine (TMA, compute capability 9.0) is told of a tensor.
#pragma once

#include <cuda.h>

#include "core/cuda.cuh"
#include "core/errors.h"

namespace specdec {

// The driver's function, asked for at run time: the module links no driver. Null where the driver has none.
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

// A tensor map (TMA) of numbers of 16 or 8 bits, or of bytes. A copy brings a box to panels of 128 bytes a row,
// swizzled as wgmma reads them, with zeros for what lies outside of the tensor; float32 numbers, as they are. Strides
// are in bytes, of all dimensions but the first.
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
