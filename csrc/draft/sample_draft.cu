// As select_topk: one block a row, or a cluster of up to 8 where rows are few, and one read of the row. Between its
// maximum and the ranking comes the noise: about 30 instructions an entry (7 of them Philox's, for four entries at a
// time), which for many rows takes longer than reading them. The two logarithms of an exact score cost more, and so
// are taken only of entries whose upper bound is among the best.
#include "core/row_topk.cuh"
#include "draft/sample_draft.h"
#include "draft/select_topk.h"

namespace specdec {
namespace {

static_assert(kMaxTopk <= kMaxRowTopk);

__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Not below perturbed(): E is at least v log2(e), the margin is above what the logarithms are off by, and rounding the
// sum keeps the order.
__device__ __forceinline__ float perturbed_at_most(float x, float max, float scale, uint32_t word) {
  constexpr float kOffset = 32 - 0.528766f + 1e-3f;
  const float log2_weight = fminf(mul(sub(x, max), scale), 0.0f);  // 0 for an x of +inf, or NaN
  return log2_weight + (kOffset - fast_log2(static_cast<float>(word) + 0.5f));
}

// Calls emit(place, id, softmax) for each draw, by threads of the first block.
template <class T, class Emit>
__device__ void sample_row(RowTopkStorage& s, uint32_t* block_max, uint32_t (&warp_max)[kRowThreads / kWarp],
                           const T* row, int64_t vocab, const DraftRow& of_row, int k, int blocks, Emit emit) {
  const int part = static_cast<int>(blockIdx.x) % blocks, thread = static_cast<int>(threadIdx.x);
  const float scale = of_row.scale;
  if (blocks > 1) cluster_arrive();
  RowShare<T, kRowThreads, kRowVectors, true> share(row, vocab, part, blocks);

  Softmax mine{-INFINITY, 0};
  const uint32_t tiles = share.num_tiles();
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    share.load(tile);
    mine.merge(softmax_of_mine(scale, [&](auto f) { share.for_each(f); }), scale);
  }

  // The row's maximum, on which scores depend.
  const uint32_t of_warp = __reduce_max_sync(kFullMask, order_key(mine.max));
  if (thread % kWarp == 0) warp_max[thread / kWarp] = of_warp;
  __syncthreads();
  uint32_t row_max = 0;
  for (const uint32_t key : warp_max) row_max = max(row_max, key);
  if (blocks > 1) {
    cluster_wait();
    if (thread < blocks) in_block(block_max, thread)[part] = row_max;
    cluster_arrive();
    cluster_wait();
    for (int i = 0; i < blocks; ++i) row_max = max(row_max, block_max[i]);
    cluster_arrive();  // for merge_blocks()
  }
  const float max_logit = key_float(row_max);
  const float sum_of_warp = warp_sum(mine.sum_below(max_logit, scale));
  if (thread % kWarp == 0) s.warp_sums[thread / kWarp] = sum_of_warp;

  const auto score = [&](float x, uint32_t word) { return perturbed(log2_weight(x, max_logit, scale), word); };

  float at_most = -INFINITY, x_of_best = -INFINITY;  // this thread's entry with the largest upper bound
  uint32_t word_of_best = 0;
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) share.load(tile);
    share.for_each_four([&](uint32_t id, const float (&x)[4]) {
      const Noise words = of_row.noise_of(id / kNoiseIds);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float bound = perturbed_at_most(x[j], max_logit, scale, words.words[j]);
        if (bound > at_most) at_most = bound, x_of_best = x[j], word_of_best = words.words[j];
      }
    });
  }

  BlockTopk<kRowThreads> topk(s.block);
  const int busy = share.busy_threads();
  const uint32_t reached = thread < busy ? order_key(score(x_of_best, word_of_best)) : 0;
  const uint32_t pivot = topk.find_pivot(reached, busy, k);
  topk.collect(pivot, k, static_cast<uint32_t>(vocab), [&](uint32_t least, auto f) {
    const float bar = key_float(least);
    unsigned lanes = __ballot_sync(kFullMask, thread < busy && !(at_most < bar));
    for (; lanes != 0; lanes &= lanes - 1) {
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        share.seek(tile);
        share.for_each_four_of(__ffs(lanes) - 1, [&](uint32_t id, const float (&x)[4]) {
          const Noise words = of_row.noise_of(id / kNoiseIds);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (perturbed_at_most(x[j], max_logit, scale, words.words[j]) < bar || id + j >= vocab) continue;
            f(entry_key(order_key(score(x[j], words.words[j])), id + j));
          }
        });
      }
    }
  });

  Softmax of_block{max_logit, 0};
  for (const float sum : s.warp_sums) of_block.sum += sum;
  merge_blocks(s, topk, of_block, scale, k, blocks, [&](int place, uint64_t key, const Softmax& softmax) {
    emit(place, static_cast<int32_t>(key_number(key)), softmax);
  });
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, 2) sample_draft_kernel(SampleDraftParams p, int blocks) {
  begin_kernel();
  __shared__ RowTopkStorage storage;
  __shared__ uint32_t block_max[kMaxRowBlocks], warp_max[kRowThreads / kWarp];
  const int64_t r = blockIdx.x / blocks;
  const int k = static_cast<int>(p.k);
  const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
  int32_t* ids = p.out_ids + r * k;
  float* logprobs = p.out_logprobs + r * k;

  const DraftRow of_row = draft_row(p, r);
  if (of_row.slot < 0) {
    if (blockIdx.x % blocks == 0 && threadIdx.x < k) {
      ids[threadIdx.x] = 0;
      logprobs[threadIdx.x] = -INFINITY;
    }
    return;
  }
  if (of_row.scale == 0) {
    row_topk(storage, row, p.vocab, k, blocks, [&](int place, int32_t id, float x, const Softmax& softmax) {
      ids[place] = p.id_map ? p.id_map[id] : id;
      logprobs[place] = softmax.logprob(x, kLog2e);
    });
  } else {
    sample_row(storage, block_max, warp_max, row, p.vocab, of_row, k, blocks,
               [&](int place, int32_t id, const Softmax& softmax) {
                 ids[place] = p.id_map ? p.id_map[id] : id;
                 logprobs[place] = softmax.logprob(to_float(row[id]), of_row.scale);
               });
  }
}

}  // namespace

void sample_draft_cuda(const SampleDraftParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    const int blocks = row_blocks<T>("sample_draft", p.rows, p.vocab);
    launch("sample_draft", sample_draft_kernel<T>,
           {.grid = grid_x("sample_draft", p.rows * blocks),
            .threads = kRowThreads,
            .cluster = static_cast<unsigned>(blocks)},
           stream, p, blocks);
  });
}

}  // namespace specdec
