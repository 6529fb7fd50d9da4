// Declare the kernels of tree_attention, one launch function each, and the helpers that launch them.
#pragma once

#include <cuda_runtime.h>

#include "attention/common/device_plan.cuh"
#include "attention/tree_attention.h"
#include "core/cuda.cuh"
#include "core/floats.h"

namespace specdec::attention {

void plain_attention(const TreeAttentionParams& p, Stream stream);

// Defined by instantiations/, one file per kernel and head dimension, so that they compile in parallel.
template <int D>
void mma_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);
template <int D>
void wgmma_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);
template <int D>
void dequant_registers_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);
template <int D>
void dequant_smem_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);
template <int D>
void cluster_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);

// Opt in to more than 48 KB of dynamic shared memory, which the runtime requires per kernel and device.
template <class KernelFunction>
void allow_shared_bytes(KernelFunction* kernel, size_t bytes) {
  if (bytes > 48 * 1024)
    SD_CUDA_CHECK("tree_attention",
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// Launch a persistent grid of plan.workers x plan.row_tiles blocks.
//
// Blocks wait for each other's partial results, so all of them must be co-resident, which only a cooperative launch
// guarantees. A kernel with kMulticast runs as clusters of two blocks if a worker has an even number of them: Hopper's
// SMs come in pairs (TPCs).
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
  const bool multicast = Attention::kMulticast && plan.row_tiles % 2 == 0;
  const unsigned count = !current_device("tree_attention").is_hopper_or_later ? 1 : multicast ? 3 : 2;
  const cudaLaunchConfig_t config{.gridDim = dim3(plan.workers * plan.row_tiles),
                                  .blockDim = dim3(Attention::kThreads),
                                  .dynamicSmemBytes = kSharedBytes,
                                  .stream = stream,
                                  .attrs = attributes,
                                  .numAttrs = count};
  SD_CUDA_CHECK("tree_attention", cudaLaunchKernelEx(&config, kernel, p, plan, more...));
}

// Call f.template operator()<T>() with the storage type of a 16-bit dtype that has been checked.
template <class F>
void with_16_bit_type(Dtypes dtype, F&& f) {
  if (dtype == kBFloat16) return f.template operator()<BFloat16>();
#ifndef SPECDEC_COMPILE_CHECK
  return f.template operator()<Half>();
#endif
}

// Call f.template operator()<T, Kv>(): T is the storage type of q and out, Kv that of the KV pools.
template <class F>
void with_16_bit_types(const TreeAttentionParams& p, F&& f) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    if (p.fp8)
      f.template operator()<T, Float8>();
    else
      f.template operator()<T, T>();
  });
}

// Call f.template operator()<D>() with a head dimension that has been checked.
template <class F>
void with_head_dim(int64_t head_dim, F&& f) {
  if (head_dim == 128) return f.template operator()<128>();
#ifndef SPECDEC_COMPILE_CHECK
  if (head_dim == 64) return f.template operator()<64>();
  return f.template operator()<256>();
#endif
}

}  // namespace specdec::attention
