// The CUDA half of tree_attention, file by file.
#pragma once

#include <cuda_runtime.h>

#include "attention/tree_attention.h"
#include "attention/work_line.cuh"

namespace specdec {

// Without tensor cores: any dtype and alignment.
void plain_attention(const TreeAttentionParams& p, Stream stream);

// mma.sync: bf16 and fp16, aligned. Rows of a tile are 16, 32 or 64.
template <int D>
void mma_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream);

// wgmma, compute capability 9.0: as mma.sync, rows of a tile are 64 or 128, KV rows of a tile are wgmma_tokens.
template <int D>
void wgmma_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream);
constexpr int wgmma_tokens(int64_t head_dim, int rows) {
  return head_dim == 64 || (head_dim == 128 && rows == 128) ? 128 : 64;
}

// Rows that no worker has done alone: merges their partial results, and gives zeros to those that have none.
void merge_parts(const TreeAttentionParams& p, const Cut& cut, Stream stream);

// More dynamic shared memory than a kernel gets unasked is a property of this device's copy of it.
template <class Kernel>
void allow_shared_bytes(Kernel* kernel, size_t bytes) {
  if (bytes > 48 * 1024)
    SD_CUDA_CHECK("tree_attention",
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

}  // namespace specdec
