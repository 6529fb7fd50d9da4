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

// The words of ids from `id` on, which may begin anywhere within a block of noise; where is the same for all vectors of
// a row.
template <uint32_t kItems>
__device__ __forceinline__ void words_from(const DraftRow& of_row, uint32_t id, uint32_t (&words)[kItems + 4]) {
  const uint32_t begin = id % kNoiseIds;
#pragma unroll
  for (uint32_t i = 0; i < kItems + 4; i += 4) {
    if (i == kItems && begin == 0) break;
    const Noise noise = of_row.noise_of(id / kNoiseIds + i / 4);
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

__device__ __forceinline__ uint32_t word_of(const DraftRow& of_row, uint32_t id) {
  const Noise noise = of_row.noise_of(id / kNoiseIds);
  const uint32_t even = id & 2 ? noise.words[2] : noise.words[0], odd = id & 2 ? noise.words[3] : noise.words[1];
  return id & 1 ? odd : even;
}

struct SampleStorage {
  RowTopkStorage row;
  uint32_t warp_max[kRowThreads / kWarp], block_max[kMaxRowBlocks];
};

// The largest logit of a row, from the largest of each thread. In a cluster, in place of a cluster_wait().
__device__ float max_of_row(SampleStorage& s, float mine, int log2_blocks) {
  const int blocks = 1 << log2_blocks, part = static_cast<int>(blockIdx.x) & (blocks - 1);
  const uint32_t of_warp = __reduce_max_sync(kFullMask, order_key(mine));
  if (threadIdx.x % kWarp == 0) s.warp_max[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  uint32_t largest = 0;
  for (const uint32_t key : s.warp_max) largest = max(largest, key);
  if (blocks == 1) return key_float(largest);
  cluster_wait();
  if (threadIdx.x < blocks) in_block(&s, static_cast<int>(threadIdx.x))->block_max[part] = largest;
  cluster_arrive();
  cluster_wait();
  for (int i = 0; i < blocks; ++i) largest = max(largest, s.block_max[i]);
  return key_float(largest);
}

// Calls emit(place, id, softmax) for each draw, by threads of the first block.
template <class T, class Emit>
__device__ void sample_row(SampleStorage& s, const T* row, int64_t vocab, const DraftRow& of_row, int k,
                           int log2_blocks, Emit emit) {
  using Share = RowShare<T, kRowThreads, kRowVectors>;
  const int part = static_cast<int>(blockIdx.x) & ((1 << log2_blocks) - 1);
  const float scale = of_row.scale;
  if (log2_blocks > 0) cluster_arrive();
  Share share(row, vocab, part, log2_blocks);
  const Softmax mine = softmax_of_share(share, scale);
  const float max = max_of_row(s, mine.max, log2_blocks);
  if (log2_blocks > 0) cluster_arrive();  // for merge_blocks()
  const float of_warp = warp_sum(mine.sum_below(max, scale));
  if (threadIdx.x % kWarp == 0) s.row.warp_sums[threadIdx.x / kWarp] = of_warp;

  float at_most = -INFINITY, x_of_best = -INFINITY;  // this thread's entry with the largest upper bound
  uint32_t word_of_best = 0;
  const auto consider = [&](float x, uint32_t word) {
    const float bound = perturbed_at_most(x, max, scale, word);
    if (bound > at_most) at_most = bound, x_of_best = x, word_of_best = word;
  };
  for (uint32_t tile = 0; tile < share.num_tiles(); ++tile)
    share.for_each_vector(tile, [&](uint32_t id, const float (&x)[Share::kItems]) {
      uint32_t words[Share::kItems + 4];
      words_from<Share::kItems>(of_row, id, words);
#pragma unroll
      for (int j = 0; j < Share::kItems; ++j) consider(x[j], words[j]);
    });
  const uint32_t single = share.single_of(threadIdx.x);
  if (single != Share::kNone) consider(share.at(single), word_of(of_row, single));

  const auto key_of = [&](float x, uint32_t word) { return order_key(perturbed(log2_weight(x, max, scale), word)); };
  const bool any = share.has_elements();
  BlockTopk<kRowThreads> topk(s.row.block);
  const uint32_t pivot = topk.find_pivot(any ? key_of(x_of_best, word_of_best) : 0, share.all_have_elements(), k);
  collect_share(topk, share, any ? order_key(at_most) : 0, pivot, k, vocab, [&](uint32_t id, uint32_t least) {
    const float x = share.at(id);
    const uint32_t word = word_of(of_row, id);
    return order_key(perturbed_at_most(x, max, scale, word)) < least ? 0 : key_of(x, word);
  });

  Softmax of_block{max, 0};
  for (const float sum : s.row.warp_sums) of_block.sum += sum;
  merge_blocks(s.row, topk, of_block, scale, k, log2_blocks, [&](int place, uint64_t key, const Softmax& softmax) {
    emit(place, static_cast<int32_t>(key_number(key)), softmax);
  });
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, 2) sample_draft_kernel(SampleDraftParams p, int log2_blocks) {
  begin_kernel();
  __shared__ SampleStorage storage;
  const int64_t r = blockIdx.x >> log2_blocks;
  const int k = static_cast<int>(p.k);
  const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
  int32_t* ids = p.out_ids + r * k;
  float* logprobs = p.out_logprobs + r * k;

  const auto each = static_cast<uint32_t>(p.rows_per_request), number = static_cast<uint32_t>(r);
  const DraftRow of_row = draft_row(p, number / each, number % each);
  if (of_row.slot < 0) {
    if ((blockIdx.x & ((1 << log2_blocks) - 1)) == 0 && threadIdx.x < k) {
      ids[threadIdx.x] = 0;
      logprobs[threadIdx.x] = -INFINITY;
    }
    return;
  }
  if (of_row.scale == 0) {
    row_topk(storage.row, row, p.vocab, k, log2_blocks, [&](int place, int32_t id, float x, const Softmax& softmax) {
      ids[place] = p.id_map ? p.id_map[id] : id;
      logprobs[place] = softmax.logprob(x, kLog2e);
    });
  } else {
    sample_row(storage, row, p.vocab, of_row, k, log2_blocks, [&](int place, int32_t id, const Softmax& softmax) {
      ids[place] = p.id_map ? p.id_map[id] : id;
      logprobs[place] = softmax.logprob(to_float(row[id]), of_row.scale);
    });
  }
}

}  // namespace

void sample_draft_cuda(const SampleDraftParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    const int log2_blocks = row_log2_blocks<T>("sample_draft", p.rows, p.vocab);
    launch("sample_draft", sample_draft_kernel<T>, row_shape("sample_draft", p.rows, log2_blocks), stream, p,
           log2_blocks);
  });
}

}  // namespace specdec
