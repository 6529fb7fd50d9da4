// Softmax and the k best of a row of logits, by one block or by a cluster of blocks that share the row.
//
// Each block reads its share once, keeping maximum and sum of exponents, and lists its own k best (block_topk.cuh). In
// a cluster it puts them, sorted, into the shared memory of the first block, which merges the lists: an entry's place
// is the number of entries ahead of it, found in each list by bisection.
#pragma once

#include <cooperative_groups.h>

#include "core/block_topk.cuh"
#include "core/row_share.cuh"
#include "core/softmax.h"

namespace specdec {

constexpr int kRowThreads = 512, kRowVectors = 8;
constexpr int kMaxRowBlocks = 8, kMaxRowTopk = 64;

// 2^x
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The largest of some numbers x, and the sum of 2^((x - max) * scale); of none: -inf and 0. The scale is log2(e) for a
// plain softmax.
struct Softmax {
  float max, sum;

  // The sum as it is beside a larger maximum.
  __device__ float sum_below(float larger, float scale) const {
    return sum * fast_exp2(below_max(max, larger) * scale);
  }

  __device__ void merge(Softmax other, float scale) {
    const float larger = fmaxf(max, other.max);
    sum = sum_below(larger, scale) + other.sum_below(larger, scale);
    max = larger;
  }

  // A probability is at most 1, whatever the rounding: build_tree relies on children never beating parents.
  __device__ float logprob(float x, float scale) const {
    return x > -INFINITY ? fminf(below_max(x, max) * scale * kLn2 - logf(sum), 0.0f) : -INFINITY;
  }
};

// Of one thread's elements: for_each(f) calls f(x) for each, NaN counting as -inf.
template <class ForEach>
__device__ Softmax softmax_of_mine(float scale, ForEach for_each) {
  Softmax mine{-INFINITY, 0};
  for_each([&](float x) { mine.max = fmaxf(mine.max, x); });  // fmaxf passes over NaN
  if (mine.max == -INFINITY) return mine;
  // 2^(x * scale - shift) in two instructions; what rounding took from the shift is made good at the end.
  const float shift = mine.max * scale;
  for_each([&](float x) { mine.sum += fast_exp2(fmaf(x, scale, -shift)); });
  mine.sum *= fast_exp2(-fmaf(mine.max, scale, -shift));
  if (mine.sum < INFINITY) return mine;
  mine.sum = 0;  // there are NaN or infinities
  for_each([&](float x) {
    if (x > -INFINITY) mine.sum += fast_exp2(below_max(x, mine.max) * scale);
  });
  return mine;
}

// In shared memory.
struct RowTopkStorage {
  typename BlockTopk<kRowThreads>::Storage block;
  float warp_sums[kRowThreads / kWarp];
  // Of the first block of a cluster: what each block found.
  uint64_t lists[kMaxRowBlocks * kMaxRowTopk];
  Softmax parts[kMaxRowBlocks];
};

__device__ __forceinline__ float warp_sum(float mine) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) mine += __shfl_xor_sync(kFullMask, mine, offset);
  return mine;
}

// Of the blocks of a cluster; a device without clusters has one block a row, and calls none of these.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
__device__ __forceinline__ void cluster_wait() { cooperative_groups::this_cluster().barrier_wait(); }
template <class U>
__device__ __forceinline__ U* in_block(U* shared, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
}
#else
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <class U>
__device__ __forceinline__ U* in_block(U* shared, int) {
  return shared;
}
#endif

// After topk.collect() in each of `blocks` blocks, the cluster of them: calls emit(place, key, softmax) for each of the
// k best of the row, by threads of the first block, and returns the softmax to all threads of that block. `of_block` is
// each block's own. In a cluster, the blocks have called cluster_arrive() once more than cluster_wait().
template <class Emit>
__device__ Softmax merge_blocks(RowTopkStorage& s, BlockTopk<kRowThreads> topk, Softmax of_block, float scale, int k,
                                int blocks, Emit emit) {
  if (blocks == 1) {
    topk.emit_best(k, [&](int place, uint64_t key) { emit(place, key, of_block); });
    return of_block;
  }

  const int part = static_cast<int>(blockIdx.x) % blocks;
  cluster_wait();
  uint64_t* list = in_block(&s.lists[part * k], 0);
  topk.emit_best(k, [&](int place, uint64_t key) { list[place] = key; });
  for (int place = topk.count() + threadIdx.x; place < k; place += kRowThreads) list[place] = 0;  // after all others
  if (threadIdx.x == 0) *in_block(&s.parts[part], 0) = of_block;
  cluster_arrive();
  cluster_wait();
  if (part != 0) return of_block;

  Softmax all{-INFINITY, 0};
  for (int i = 0; i < blocks; ++i) all.max = fmaxf(all.max, s.parts[i].max);
  for (int i = 0; i < blocks; ++i) all.sum += s.parts[i].sum_below(all.max, scale);

  // The first ceil(k / blocks) entries of all lists are k or more: the k best reach the least of them.
  uint64_t least = ~uint64_t{0};
  for (int i = 0; i < blocks; ++i) least = min(least, s.lists[i * k + (k + blocks - 1) / blocks - 1]);
  const int first_step = 1 << (31 - __clz(k));
  for (int e = threadIdx.x; e < blocks * k; e += kRowThreads) {
    const uint64_t key = s.lists[e];
    if (key == 0 || key < least) continue;
    int ahead[kMaxRowBlocks] = {};  // entries ahead of `key` in each list: bisected, since lists are sorted
    for (int step = first_step; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kMaxRowBlocks; ++i)
        if (i < blocks && ahead[i] + step <= k && s.lists[i * k + ahead[i] + step - 1] > key) ahead[i] += step;
    }
    int place = 0;
    for (const int of_list : ahead) place += of_list;
    if (place < k) emit(place, key, all);
  }
  return all;
}

// Called by `blocks` blocks of kRowThreads, the cluster of them. Calls emit(place, id, x, softmax) for each of the k
// best of the row, by threads of the first block; returns the softmax to all threads of that block.
template <class T, class Emit>
__device__ Softmax row_topk(RowTopkStorage& s, const T* row, int64_t vocab, int k, int blocks, Emit emit) {
  if (blocks > 1) cluster_arrive();  // the first block's shared memory is there once all have arrived
  RowShare<T, kRowThreads, kRowVectors> share(row, vocab, static_cast<int>(blockIdx.x) % blocks, blocks);

  Softmax mine{-INFINITY, 0};
  const uint32_t tiles = share.num_tiles();
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    share.load(tile);
    mine.merge(softmax_of_mine(kLog2e, [&](auto f) { share.for_each(f); }), kLog2e);
  }

  BlockTopk<kRowThreads> topk(s.block);
  const int busy = share.busy_threads();
  const uint32_t best_of_mine = static_cast<int>(threadIdx.x) < busy ? order_key(mine.max) : 0;
  const uint32_t pivot = topk.find_pivot(best_of_mine, busy, k);

  Softmax of_block{key_float(max(topk.best(), kKeyOfMinusInf)), 0};
  const float of_warp = warp_sum(mine.sum_below(of_block.max, kLog2e));
  if (threadIdx.x % kWarp == 0) s.warp_sums[threadIdx.x / kWarp] = of_warp;

  topk.collect(pivot, k, static_cast<uint32_t>(vocab), [&](uint32_t least, auto f) {
    if (best_of_mine < least) return;
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      if (tiles > 1) share.load(tile);
      share.for_each_from(key_float(least), [&](float x, uint32_t id) { f(entry_key(order_key(x), id)); });
    }
  });
  for (float sum : s.warp_sums) of_block.sum += sum;

  return merge_blocks(s, topk, of_block, kLog2e, k, blocks, [&](int place, uint64_t key, const Softmax& softmax) {
    emit(place, static_cast<int32_t>(key_number(key)), key_float(key_score(key)), softmax);
  });
}

// How many blocks share a row: as many as keep the GPU busy once, as long as each has a few vectors a thread or more.
template <class T>
int row_blocks(const char* op, int64_t rows, int64_t vocab) {
  if (!is_hopper_or_later(op)) return 1;
  int device = 0, processors = 0;
  SD_CUDA_CHECK(op, cudaGetDevice(&device));
  SD_CUDA_CHECK(op, cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t vectors = RowShare<T, kRowThreads, kRowVectors>::num_vectors(vocab);
  int blocks = 1;
  while (blocks < 8 && rows * blocks * 2 <= 2 * processors && vectors >= kRowThreads / 2 * blocks * 2) blocks *= 2;
  while (blocks < 8 && vectors > static_cast<int64_t>(kRowThreads) * kRowVectors * blocks) blocks *= 2;
  return blocks;
}

}  // namespace specdec
