// row_topk: softmax and top-k of a row of logits, by one block or by a cluster of blocks that share the row.
//
// Each block reads its part once, keeps maximum and sum of exponentials, and lists its own k best (block_topk.cuh). In
// a cluster, blocks put their sorted lists into the first block's shared memory, which ranks the best of all lists
// again.
#pragma once

#include <bit>

#include "core/block_topk.cuh"
#include "core/cluster.cuh"
#include "core/row_share.cuh"
#include "core/warp.cuh"

namespace specdec {

constexpr int kRowVectors = 8, kRowBlocksPerSm = 2;
constexpr int kMaxRowBlocks = kMaxCluster, kMaxRowTopk = 64;
static_assert(kMaxRowBlocks * kMaxRowTopk <= BlockTopk<kRowThreads>::kCapacity);

// 2^x
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The largest of some elements x and the sum of 2^((x - max) * scale); -inf and 0 for no elements. The scale is log2(e)
// for a plain softmax.
struct Softmax {
  float max, sum;

  // Return the sum rescaled to a larger maximum.
  __device__ float sum_below(float larger, float scale) const {
    return sum * fast_exp2(below_max(max, larger) * scale);
  }

  __device__ void merge(Softmax other, float scale) {
    const float larger = fmaxf(max, other.max);
    sum = sum_below(larger, scale) + other.sum_below(larger, scale);
    max = larger;
  }

  // Return log p, clamped to at most 0 despite rounding: build_tree relies on children never scoring above parents.
  __device__ float logprob(float x, float scale) const {
    return x > -INFINITY ? fminf(below_max(x, max) * scale * kLn2 - logf(sum), 0.0f) : -INFINITY;
  }
};

// Return the softmax of this thread's elements in the loaded tile; NaN counts as -inf.
template <class Share>
__device__ Softmax softmax_of_mine(const Share& share, uint32_t tile, float scale) {
  Softmax mine{share.largest(), 0};
  if (mine.max == -INFINITY) return mine;
  // 2^(x * scale - shift) takes two instructions; the shift's rounding error is corrected at the end.
  const float shift = mine.max * scale;
  share.for_each([&](float x) { mine.sum += fast_exp2(fmaf(x, scale, -shift)); });
  mine.sum *= fast_exp2(-fmaf(mine.max, scale, -shift));
  if (mine.sum < INFINITY) return mine;
  mine.sum = 0;  // NaN or infinities present
#pragma unroll 1
  for (uint32_t e = 0; e < Share::kElements; ++e) {
    const uint32_t id = share.id_of(tile, threadIdx.x, e);
    const float x = id == Share::kNone ? -INFINITY : share.at(id);
    if (x > -INFINITY) mine.sum += fast_exp2(below_max(x, mine.max) * scale);
  }
  return mine;
}

// Return the softmax of all of this thread's elements.
template <class Share>
__device__ Softmax softmax_of_share(Share& share, float scale) {
  Softmax mine{-INFINITY, 0};
  for (uint32_t tile = 0; tile < share.num_tiles(); ++tile) {
    share.load(tile);
    mine.merge(softmax_of_mine(share, tile, scale), scale);
  }
  return mine;
}

// In shared memory.
struct RowTopkStorage {
  typename BlockTopk<kRowThreads>::Storage block;
  float warp_sums[kRowThreads / kWarp];
  // Results of all blocks of a cluster; used in the first block.
  uint64_t lists[kMaxRowBlocks * kMaxRowTopk];
  Softmax parts[kMaxRowBlocks];
};

// Merge the results of a cluster of 2^log2_blocks blocks, after topk.collect() in each: threads of the first block call
// emit(rank, key, softmax) for each of the row's k best, and all its threads get the row's softmax. `of_block` is the
// block's own softmax. In a cluster of several blocks, each has called Cluster::arrive() once more than
// Cluster::wait().
template <class Emit>
__device__ Softmax merge_blocks(RowTopkStorage& s, BlockTopk<kRowThreads> topk, Softmax of_block, float scale, int k,
                                int log2_blocks, Emit emit) {
  const int blocks = 1 << log2_blocks, part = static_cast<int>(blockIdx.x) & (blocks - 1);
  if (blocks == 1) {
    topk.rank(k, [&](int place, uint64_t key) { emit(place, key, of_block); });
    return of_block;
  }
  Cluster::wait();
  RowTopkStorage& first = *Cluster::at(&s, 0);
  topk.rank(k, [&](int place, uint64_t key) { first.lists[part * k + place] = key; });
  for (int place = topk.count() + threadIdx.x; place < k; place += kRowThreads) first.lists[part * k + place] = 0;
  if (threadIdx.x == 0) first.parts[part] = of_block;
  Cluster::arrive();
  Cluster::wait();
  if (part != 0) return of_block;

  // Lane i of every warp reads the results of block i.
  const int lane = threadIdx.x % kWarp;
  const Softmax mine = lane < blocks ? s.parts[lane] : Softmax{-INFINITY, 0};
  Softmax all{key_float(__reduce_max_sync(kFullMask, order_key(mine.max))), 0};
  all.sum = warp_sum(mine.sum_below(all.max, scale));
  // The first ceil(k / blocks) entries of all lists are at least k entries, so the k best reach the least of them.
  uint64_t least = lane < blocks ? s.lists[lane * k + ((k + blocks - 1) >> log2_blocks) - 1] : ~uint64_t{0};
  for (int offset = 1; offset < kMaxRowBlocks; offset *= 2)
    least = min(least, __shfl_xor_sync(kFullMask, least, offset));
  least = __shfl_sync(kFullMask, least, 0);

  topk.clear();
#pragma unroll 1
  for (int e = threadIdx.x; e < blocks * k; e += kRowThreads)
    if (s.lists[e] >= least && s.lists[e] > 0) topk.append(s.lists[e]);
  __syncthreads();
  topk.rank(k, [&](int place, uint64_t key) { emit(place, key, all); });
  return all;
}

// Find a row's top-k; called by a cluster of 2^log2_blocks blocks of kRowThreads. Threads of the first block call
// emit(rank, id, x, softmax) for each of the k best, and all its threads get the row's softmax.
template <class T, class Emit>
__device__ Softmax row_topk(RowTopkStorage& s, const T* row, int64_t vocab, int k, int log2_blocks, Emit emit) {
  if (log2_blocks > 0) Cluster::arrive();  // the first block's shared memory exists once all have arrived
  const int part = static_cast<int>(blockIdx.x) & ((1 << log2_blocks) - 1);
  RowShare<T, kRowThreads, kRowVectors> share(row, vocab, part, log2_blocks);
  const Softmax mine = softmax_of_share(share, kLog2e);

  BlockTopk<kRowThreads> topk(s.block);
  const uint32_t best_of_mine = share.has_elements() ? order_key(mine.max) : 0;
  const uint32_t pivot = topk.find_pivot(best_of_mine, share.all_have_elements(), k);

  Softmax of_block{key_float(max(topk.best(), kKeyOfMinusInf)), 0};
  const float of_warp = warp_sum(mine.sum_below(of_block.max, kLog2e));
  if (threadIdx.x % kWarp == 0) s.warp_sums[threadIdx.x / kWarp] = of_warp;
  topk.collect(pivot, k, static_cast<uint32_t>(vocab), [&](uint32_t least, auto f) {
    if (best_of_mine < least) return;
    const uint32_t tiles = share.num_tiles();
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      if (tiles > 1) share.load(tile);
      share.for_each_from(key_float(least), [&](float x, uint32_t id) { f(entry_key(order_key(x), id)); });
    }
  });
  for (const float sum : s.warp_sums) of_block.sum += sum;

  return merge_blocks(s, topk, of_block, kLog2e, k, log2_blocks, [&](int place, uint64_t key, const Softmax& softmax) {
    emit(place, static_cast<int32_t>(key_id(key)), key_float(key_score(key)), softmax);
  });
}

// Return log2 of the blocks per row: at most one block per SM, and each with at least one vector per thread.
template <class T>
int row_log2_blocks(const char* op, int64_t rows, int64_t vocab) {
  constexpr int64_t kUseful = kRowThreads * static_cast<int64_t>(sizeof(uint4) / sizeof(T));
  return std::countr_zero(cluster_size(op, rows, 1, vocab / kUseful));
}

// Return the launch configuration of a row kernel, whose last argument is log2_blocks.
inline LaunchShape row_shape(const char* op, int64_t rows, int log2_blocks) {
  return {.grid = grid_x(op, rows << log2_blocks), .threads = kRowThreads, .cluster = 1u << log2_blocks};
}

}  // namespace specdec
