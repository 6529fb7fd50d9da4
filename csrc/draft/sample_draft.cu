// sample_draft on a GPU: one block per row, or a cluster of up to 8 if there are few rows, as in select_topk; the row
// is read from memory once.
//
// Noise then costs about 35 instructions per entry (mostly Philox, for four entries at a time); for many rows this
// takes longer than reading them. The two logarithms of an exact score would cost as much again: they are computed only
// for entries whose upper bound, which costs one fast logarithm, is among the best.
//
// A request's draft temperature enters in draft_row() (sample_draft.h).
#include "core/row_topk.cuh"
#include "draft/sample_draft.h"
#include "draft/select_topk.h"

namespace specdec::draft {
namespace {

static_assert(kMaxTopk <= kMaxRowTopk);

__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Return an upper bound of perturbed(): E is at least v log2(e), the margin exceeds the error of the logarithms, and
// rounding the sum is monotonic.
__device__ __forceinline__ float perturbed_upper_bound(float x, float max, float scale, uint32_t word) {
  constexpr float kOffset = 32 - 0.528766f + 1e-3f;
  const float log2_weight = fminf(mul(sub(x, max), scale), 0.0f);  // 0 for an x of +inf or NaN
  return log2_weight + (kOffset - fast_log2(static_cast<float>(word) + 0.5f));
}

// Load the words of ids from `id` on. `id` may lie anywhere in a block of noise, at the same offset for all vectors of
// a row.
template <uint32_t kItems>
__device__ __forceinline__ void words_from(const DraftRow& state, uint32_t id, uint32_t (&words)[kItems + 4]) {
  const uint32_t begin = id % kNoiseIds;
#pragma unroll
  for (uint32_t i = 0; i < kItems + 4; i += 4) {
    if (i == kItems && begin == 0) break;
    const Noise noise = state.noise_of(id / kNoiseIds + i / 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) words[i + j] = noise.words[j];
  }
  if (begin & 1) {
#pragma unroll
    for (uint32_t i = 0; i + 1 < kItems + 4; ++i) words[i] = words[i + 1];
  }
  if (begin & 2) {
#pragma unroll
    for (uint32_t i = 0; i + 2 < kItems + 4; ++i) words[i] = words[i + 2];
  }
}

// noinline, as is score_key(): few entries are evaluated exactly, and small code is fast code.
__device__ __noinline__ uint32_t word_of(const DraftRow& state, uint32_t id) {
  const Noise noise = state.noise_of(id / kNoiseIds);
  const uint32_t even = id & 2 ? noise.words[2] : noise.words[0], odd = id & 2 ? noise.words[3] : noise.words[1];
  return id & 1 ? odd : even;
}

__device__ __noinline__ uint32_t score_key(float x, float max, float scale, uint32_t word) {
  return order_key(perturbed(log2_weight(x, max, scale), word));
}

struct SampleStorage {
  RowTopkStorage row;
  uint32_t warp_max[kRowThreads / kWarp], block_max[kMaxRowBlocks];
  float at_most[kRowVectors][kRowThreads];  // upper bound of the scores of each thread's vectors
};

// Return the largest logit of a row from each thread's largest. In a cluster this replaces a Cluster::wait().
__device__ float row_max(SampleStorage& s, float mine, int log2_blocks) {
  const int blocks = 1 << log2_blocks, part = static_cast<int>(blockIdx.x) & (blocks - 1);
  const uint32_t of_warp = __reduce_max_sync(kFullMask, order_key(mine));
  if (threadIdx.x % kWarp == 0) s.warp_max[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  uint32_t largest = 0;
  for (const uint32_t key : s.warp_max) largest = max(largest, key);
  if (blocks == 1) return key_float(largest);
  Cluster::wait();
  if (threadIdx.x < blocks) Cluster::at(&s, threadIdx.x)->block_max[part] = largest;
  Cluster::arrive();
  Cluster::wait();
  for (int i = 0; i < blocks; ++i) largest = max(largest, s.block_max[i]);
  return key_float(largest);
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
    sample_draft_kernel(SampleDraftParams p, int log2_blocks) {
  begin_kernel();
  using Share = RowShare<T, kRowThreads, kRowVectors>;
  __shared__ SampleStorage s;
  const auto r = static_cast<uint32_t>(blockIdx.x) >> log2_blocks;
  const int k = static_cast<int>(p.k), part = static_cast<int>(blockIdx.x) & ((1 << log2_blocks) - 1);
  const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
  int32_t* ids = p.out_ids + static_cast<int64_t>(r) * k;
  float* logprobs = p.out_logprobs + static_cast<int64_t>(r) * k;

  const auto rows_per_request = static_cast<uint32_t>(p.rows_per_request);  // 64-bit division is slow
  const DraftRow state = draft_row(p, r / rows_per_request, r % rows_per_request);
  if (state.slot < 0) {
    if (part == 0 && threadIdx.x < k) {
      ids[threadIdx.x] = 0;
      logprobs[threadIdx.x] = -INFINITY;
    }
    return;
  }
  const bool greedy = state.scale == 0;
  const float scale = greedy ? kLog2e : state.scale;

  if (log2_blocks > 0) Cluster::arrive();
  Share share(row, p.vocab, part, log2_blocks);
  const Softmax mine = softmax_of_share(share, scale);
  const float max = row_max(s, mine.max, log2_blocks);
  if (log2_blocks > 0) Cluster::arrive();  // for merge_blocks()
  const float of_warp = warp_sum(mine.sum_below(max, scale));
  if (threadIdx.x % kWarp == 0) s.row.warp_sums[threadIdx.x / kWarp] = of_warp;

  // Upper bounds of this thread's entries and of each of its vectors, and the entry with the highest bound.
  const uint32_t tiles = share.num_tiles(), single = share.single_of(threadIdx.x), thread = threadIdx.x;
  float at_most = greedy ? mine.max : -INFINITY, x_of_best = at_most;
  uint32_t word_of_best = 0;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) s.at_most[i][thread] = at_most;
  const auto consider = [&](float x, uint32_t word) {
    const float bound = perturbed_upper_bound(x, max, scale, word);
    if (bound > at_most) at_most = bound, x_of_best = x, word_of_best = word;
    return bound;
  };
  const auto all_vectors = [](int) { return true; };
  if (!greedy) {
    for (uint32_t tile = 0; tile < tiles; ++tile)
      share.for_each_vector(tile, all_vectors, [&](int i, uint32_t id, const float (&x)[Share::kItems]) {
        uint32_t words[Share::kItems + 4];
        words_from<Share::kItems>(state, id, words);
        float bound = s.at_most[i][thread];
#pragma unroll
        for (int j = 0; j < Share::kItems; ++j) bound = fmaxf(bound, consider(x[j], words[j]));
        s.at_most[i][thread] = bound;
      });
    if (single != Share::kNone) consider(share.at(single), word_of(state, single));
  }

  const auto key_of = [&](float x, uint32_t word) { return greedy ? order_key(x) : score_key(x, max, scale, word); };
  const bool any = share.has_elements();
  BlockTopk<kRowThreads> topk(s.row.block);
  const uint32_t pivot = topk.find_pivot(any ? key_of(x_of_best, word_of_best) : 0, share.all_have_elements(), k);
  topk.collect(pivot, k, static_cast<uint32_t>(p.vocab), [&](uint32_t least, auto f) {
    if (!any || order_key(at_most) < least) return;
    const float bar = key_float(least);
    const auto reaches = [&](int i) { return !(s.at_most[i][thread] < bar); };
    for (uint32_t tile = 0; tile < tiles; ++tile)
      share.for_each_vector(tile, reaches, [&](int, uint32_t id, const float (&x)[Share::kItems]) {
        uint32_t words[Share::kItems + 4] = {};
        if (!greedy) words_from<Share::kItems>(state, id, words);
#pragma unroll
        for (int j = 0; j < Share::kItems; ++j)
          if (greedy ? !(x[j] < bar) : !(perturbed_upper_bound(x[j], max, scale, words[j]) < bar))
            f(entry_key(key_of(x[j], words[j]), id + j));
      });
    if (single != Share::kNone) f(entry_key(key_of(share.at(single), word_of(state, single)), single));
  });

  Softmax of_block{max, 0};
  for (const float sum : s.row.warp_sums) of_block.sum += sum;
  merge_blocks(s.row, topk, of_block, scale, k, log2_blocks, [&](int place, uint64_t key, const Softmax& softmax) {
    const auto id = static_cast<int32_t>(key_id(key));
    ids[place] = p.id_map ? p.id_map[id] : id;
    logprobs[place] = softmax.logprob(share.at(id), scale);
  });
}

}  // namespace

void sample_draft_cuda(const SampleDraftParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    const int log2_blocks = row_log2_blocks<T>("sample_draft", p.rows, p.vocab);
    launch("sample_draft", sample_draft_kernel<T>, row_shape("sample_draft", p.rows, log2_blocks), stream, p,
           log2_blocks);
  });
}

}  // namespace specdec::draft
