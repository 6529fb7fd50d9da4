// select_topk on a GPU.
//
// Few rows: one block per row, or a cluster of up to 8. The row is read once and held in registers (row_topk.cuh), so
// the cost is one read, two block barriers and a cluster barrier.
//
// Many rows: reading 2 or 4 bytes per entry should be the only cost. But blocks that hold a row leave memory idle while
// they select, and only two fit an SM. So five smaller blocks per SM stream their rows tile by tile and hold nothing:
// entries that reach a pivot from the first tile, a few times k per row, go to a list. The exponentials, 16 per cycle,
// take half the time of reading 16-bit rows and overlap with it.
#include "core/row_topk.cuh"
#include "draft/select_topk.h"

namespace specdec::draft {
namespace {

static_assert(kMaxTopk <= kMaxRowTopk);

template <class T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
    select_topk_kernel(SelectTopkParams p, int log2_blocks) {
  begin_kernel();
  __shared__ RowTopkStorage storage;
  const int64_t r = blockIdx.x >> log2_blocks;
  const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
  row_topk(storage, row, p.vocab, static_cast<int>(p.k), log2_blocks,
           [&](int place, int32_t id, float x, const Softmax& softmax) {
             p.out_ids[r * p.k + place] = p.id_map ? p.id_map[id] : id;
             p.out_logprobs[r * p.k + place] = softmax.logprob(x, kLog2e);
           });
}

constexpr int kStreamThreads = 256, kStreamVectors = 6, kStreamBlocksPerSm = 5;
constexpr int kMaxHits = 256;

template <class T>
using StreamShare = RowShare<T, kStreamThreads, kStreamVectors>;

struct StreamStorage {
  typename BlockTopk<kStreamThreads>::Storage block;
  Softmax parts[kStreamThreads / kWarp];
  uint4 hits[kMaxHits];  // vectors with an entry that reaches the pivot
  uint32_t hit_ids[kMaxHits];
  int num_hits;
};

// One block per row.
template <class T>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocksPerSm) select_topk_stream_kernel(SelectTopkParams p) {
  begin_kernel();
  using Share = StreamShare<T>;
  __shared__ StreamStorage s;
  const int64_t r = blockIdx.x;
  const int k = static_cast<int>(p.k), thread = static_cast<int>(threadIdx.x);
  Share share(static_cast<const T*>(p.logits) + r * p.logits_stride, p.vocab, 0, 0);
  const uint32_t tiles = share.num_tiles();
  BlockTopk<kStreamThreads> topk(s.block);

  share.load(0);
  float best = share.largest();
  if (thread == 0) s.num_hits = 0;
  const uint32_t pivot = topk.find_pivot(order_key(best), share.all_have_elements(), k);
  // Exponentials are relative to the first tile's maximum, which is rarely far below the row's.
  const float least = key_float(pivot), reference = key_float(topk.best()), shift = reference * kLog2e;
  float sum = 0;
  const auto process_tile = [&] {
    share.for_each([&](float x) { sum += fast_exp2(fmaf(x, kLog2e, -shift)); });
    share.for_each_vector_from(
        least,
        [&](uint4 vector, uint32_t id) {
          const int at = atomicAdd(&s.num_hits, 1);
          if (at >= kMaxHits) return;
          s.hits[at] = vector;
          s.hit_ids[at] = id;
        },
        [&](float x, uint32_t id) { topk.append(entry_key(order_key(x), id)); });
  };
  process_tile();
#pragma unroll 1
  for (uint32_t tile = 1; tile < tiles; ++tile) {  // peeling the first iteration is 5 % faster
    share.load(tile);
    best = fmaxf(best, share.largest());
    process_tile();
  }
  Softmax mine{reference, sum * fast_exp2(-fmaf(reference, kLog2e, -shift))};  // undo the rounding of `shift`
  if (!(mine.sum < INFINITY))
    mine = softmax_of_share(share, kLog2e);  // NaN, infinities, or a reference far below the maximum
  const float of_warp = key_float(__reduce_max_sync(kFullMask, order_key(fmaxf(mine.max, best))));
  const float sum_of_warp = warp_sum(mine.sum_below(of_warp, kLog2e));
  if (thread % kWarp == 0) s.parts[thread / kWarp] = {of_warp, sum_of_warp};
  __syncthreads();

  constexpr int kItems = Share::kItems;
  const int hits = s.num_hits;
  for (int e = thread; e < min(hits, kMaxHits) * kItems; e += kStreamThreads) {
    const float x = to_float(reinterpret_cast<const T*>(s.hits)[e]);
    if (!(x < least)) topk.append(entry_key(order_key(x), s.hit_ids[e / kItems] + e % kItems));
  }
  __syncthreads();
  if (hits > kMaxHits ||
      topk.count() > topk.kCapacity) {  // e.g. in an increasing row: repeat with a pivot of the whole row
    topk.clear();
    const uint32_t best_of_mine = order_key(best), of_all = topk.find_pivot(best_of_mine, true, k);
    topk.collect(of_all, k, static_cast<uint32_t>(p.vocab), [&](uint32_t from, auto f) {
      if (best_of_mine < from) return;
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        share.load(tile);
        share.for_each_from(key_float(from), [&](float x, uint32_t id) { f(entry_key(order_key(x), id)); });
      }
    });
  }
  topk.rank(k, [&](int place, uint64_t key) {
    Softmax all{-INFINITY, 0};  // computed by few warps: all of them would delay the exponentials of other blocks
    for (const Softmax& part : s.parts) all.max = fmaxf(all.max, part.max);
    for (const Softmax& part : s.parts) all.sum += part.sum_below(all.max, kLog2e);
    const auto id = static_cast<int32_t>(key_id(key));
    p.out_ids[r * p.k + place] = p.id_map ? p.id_map[id] : id;
    p.out_logprobs[r * p.k + place] = all.logprob(key_float(key_score(key)), kLog2e);
  });
}

// Return whether there are more rows than resident row-holding blocks, and at most half a list is expected.
template <class T>
bool uses_streaming(const SelectTopkParams& p) {
  constexpr int64_t kTile = int64_t{kStreamThreads} * kStreamVectors * (sizeof(uint4) / sizeof(T));
  return p.rows > kRowBlocksPerSm * current_device("select_topk").num_sms && p.vocab > kTile &&
         p.k * p.vocab <= kTile * (kMaxHits / 2);
}

}  // namespace

void select_topk_cuda(const SelectTopkParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    if (uses_streaming<T>(p)) {
      launch("select_topk", select_topk_stream_kernel<T>,
             {.grid = grid_x("select_topk", p.rows), .threads = kStreamThreads}, stream, p);
      return;
    }
    const int log2_blocks = row_log2_blocks<T>("select_topk", p.rows, p.vocab);
    launch("select_topk", select_topk_kernel<T>, row_shape("select_topk", p.rows, log2_blocks), stream, p, log2_blocks);
  });
}

}  // namespace specdec::draft
