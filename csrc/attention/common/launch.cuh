// The kernels of tree_attention, one function for each, and how they are launched.
#pragma once

#include <cuda_runtime.h>

#include "attention/common/device_plan.cuh"
#include "core/cuda.cuh"
#include "core/floats.h"

namespace specdec::attention {

void plain_attention(const TreeAttentionParams& p, Stream stream);

// One file of instantiations/ defines each of these for one head dimension, so that they compile side by side.
template <int D>
void mma_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);
template <int D>
void wgmma_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);
template <int D>
void dequant_registers_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);
template <int D>
void dequant_smem_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);
template <int D>  // 64 or 128
void cluster_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);

// A kernel gets more than 48 KB of dynamic shared memory only if it was asked for on this device.
template <class KernelFunction>
void allow_shared_bytes(KernelFunction* kernel, size_t bytes) {
  if (bytes > 48 * 1024)
    SD_CUDA_CHECK("tree_attention",
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// Launches a persistent grid: plan.row_tiles blocks for each worker. Blocks wait for each other's partial results, so
// all have to run at once, which only a cooperative launch guarantees. A kernel with kPairs makes clusters of two
// blocks where a worker has an even number of them: multiprocessors come in twos.
template <class Attention, class KernelFunction, class... More>
void launch_persistent(KernelFunction* kernel, const TreeAttentionParams& p, const DevicePlan& plan, Stream stream,
                       const More&... more) {
  constexpr size_t kSharedBytes = sizeof(typename Attention::Shared);
  allow_shared_bytes(kernel, kSharedBytes);
  cudaLaunchAttribute attributes[3];
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  attributes[2].id = cudaLaunchAttributeClusterDimension;
  attributes[2].val.clusterDim = {2, 1, 1};
  const bool pairs = Attention::kPairs && plan.row_tiles % 2 == 0;
  const unsigned count = !current_device("tree_attention").is_hopper_or_later ? 1 : pairs ? 3 : 2;
  const cudaLaunchConfig_t config{.gridDim = dim3(plan.workers * plan.row_tiles),
                                  .blockDim = dim3(Attention::kThreads),
                                  .dynamicSmemBytes = kSharedBytes,
                                  .stream = stream,
                                  .attrs = attributes,
                                  .numAttrs = count};
  SD_CUDA_CHECK("tree_attention", cudaLaunchKernelEx(&config, kernel, p, plan, more...));
}

// Calls f.template operator()<T>() with the storage type of a checked 16-bit dtype.
template <class F>
void with_16_bit_type(Dtypes dtype, F&& f) {
  if (dtype == kBFloat16) return f.template operator()<BFloat16>();
  return f.template operator()<Half>();
}

// Calls f.template operator()<T, Kv>() with the storage types of q and out, and of the pools.
template <class F>
void with_16_bit_types(const TreeAttentionParams& p, F&& f) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    if (p.fp8)
      f.template operator()<T, Float8>();
    else
      f.template operator()<T, T>();
  });
}

// Calls f.template operator()<D>() with a checked head dimension.
template <class F>
void with_head_dim(int64_t head_dim, F&& f) {
  if (head_dim == 64) return f.template operator()<64>();
  if (head_dim == 128) return f.template operator()<128>();
  return f.template operator()<256>();
}

}  // namespace specdec::attention
