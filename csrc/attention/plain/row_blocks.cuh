// Map block x of a grid to query rows of a request, where only the device knows the lengths.
#pragma once

#include "attention/common/visibility.h"
#include "core/warp.cuh"

namespace specdec::attention {

// Return the blocks of one request. A request without rows still has one block, which reports its status.
__device__ inline int64_t row_blocks(const AttentionCall& p, int64_t rows, int per_block) {
  return max((rows * (p.q_heads / p.kv_heads) + per_block - 1) / per_block, int64_t{1});
}

// Return how many blocks cover every request; computed on the host, as an upper bound for packed rows.
inline int64_t count_row_blocks(const AttentionCall& p, int per_block) {
  const int64_t rows = p.q_rows * (p.q_heads / p.kv_heads);
  // Packed requests differ in length, but each adds at most one block to what one long request would need.
  return p.cu_seqlens_q ? rows / per_block + p.batch + 1 : (rows + per_block - 1) / per_block * p.batch;
}

struct RowBlock {
  int64_t request;    // batch: the padding rows after the last packed request; -1: nothing to do
  int64_t first_row;  // row n is query row n / G, head n % G of its GQA group
};

// Find block x. Call from all lanes of a warp; each warp finds it by itself.
__device__ inline RowBlock find_row_block(const AttentionCall& p, int per_block, int64_t x) {
  if (p.cu_seqlens_q == nullptr) {
    const int64_t each = (p.q_rows * (p.q_heads / p.kv_heads) + per_block - 1) / per_block;
    return {x / each, x % each * per_block};
  }
  const int lane = threadIdx.x % kWarp;
  for (int64_t base = 0; base <= p.batch; base += kWarp) {
    const int64_t blocks = base + lane <= p.batch ? row_blocks(p, load_request(p, base + lane).rows, per_block) : 0;
    const int64_t prefix = sum_up_to_lane(blocks);
    const unsigned found = __ballot_sync(kFullMask, prefix > x);
    if (found != 0) {
      const int owner = __ffs(found) - 1;
      return {base + owner, (x - __shfl_sync(kFullMask, prefix - blocks, owner)) * per_block};
    }
    x -= __shfl_sync(kFullMask, prefix, kWarp - 1);
  }
  return {-1, 0};
}

}  // namespace specdec::attention
