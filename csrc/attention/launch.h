// The CUDA half of tree_attention, file by file.
#pragma once

#include <cuda_runtime.h>

#include "attention/tree_attention.h"
#include "attention/work_line.cuh"
#include "core/floats.h"

namespace specdec {

// Without tensor cores: any dtype and alignment.
void plain_attention(const TreeAttentionParams& p, Stream stream);

// mma.sync: bf16 and fp16, aligned, pools also 8-bit floats. Rows of a tile are 16, 32 or 64, KV rows of a tile are
// mma_tokens, which have the same bytes.
template <int D>
void mma_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream);
constexpr int mma_tokens(bool fp8) { return fp8 ? 128 : 64; }

// wgmma, compute capability 9.0: 16-bit pools. Rows of a tile are 64 or 128, KV rows of a tile are wgmma_tokens.
template <int D>
void wgmma_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream);
constexpr int wgmma_tokens(int64_t head_dim, int rows) {
  return head_dim == 64 || (head_dim == 128 && rows == 128) ? 128 : 64;
}

// wgmma of 8-bit pools, compute capability 9.0. Of few rows, 16, 32 or 64 a tile, they become 16 bits in registers; of
// more, 64 or 128 a tile, in shared memory, where KV rows of a tile are wgmma_tokens.
template <int D>
void wgmma_fp8_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream);
constexpr int kWgmmaFp8Tokens = 64;
template <int D>
void wgmma_widened_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream);

// Clusters, compute capability 9.0, where requests are few: head dimensions of 64 and 128. Rows of a tile are 16, 64 or
// 128.
namespace few {
template <int D>
void cluster_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream);
}

// More dynamic shared memory than a kernel gets unasked is a property of this device's copy of it.
template <class Kernel>
void allow_shared_bytes(Kernel* kernel, size_t bytes) {
  if (bytes > 48 * 1024)
    SD_CUDA_CHECK("tree_attention",
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// Starts a kernel of the tensor cores: `lanes` blocks for each worker. They wait for each other, so they have to run at
// once, which only a cooperative launch makes sure of. Blocks of a kernel with kPairs are clusters of two where a
// worker has an even number: multiprocessors come in twos.
template <class Attention, class Kernel, class... More>
void start_on_tensor_cores(Kernel* kernel, const TreeAttentionParams& p, const Cut& cut, Stream stream,
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
  const bool pairs = Attention::kPairs && cut.lanes % 2 == 0;
  const unsigned count = !current_device("tree_attention").is_hopper_or_later ? 1 : pairs ? 3 : 2;
  const cudaLaunchConfig_t config{.gridDim = dim3(cut.max_workers * cut.lanes),
                                  .blockDim = dim3(Attention::kThreads),
                                  .dynamicSmemBytes = kSharedBytes,
                                  .stream = stream,
                                  .attrs = attributes,
                                  .numAttrs = count};
  SD_CUDA_CHECK("tree_attention", cudaLaunchKernelEx(&config, kernel, p, cut, more...));
}

// Calls f.template operator()<T>() with the storage type of a checked 16-bit dtype.
template <class F>
void with_16_bit_type(Dtypes dtype, F&& f) {
  if (dtype == kBFloat16) return f.template operator()<BFloat16>();
  return f.template operator()<Half>();
}

// Calls f.template operator()<T, Kv>() with those of q and out, and of the pools.
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

}  // namespace specdec
