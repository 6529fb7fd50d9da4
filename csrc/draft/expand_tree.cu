// expand_root on a GPU: every thread writes its columns; 12 bytes per candidate and 8 per mask word.
//
// expand_tree on a GPU: one block per row. A child is about 28 bytes, so dependent latencies dominate: all loads but
// one (the parents' scores) start at once; then one barrier for the scores, the ranking (block_topk.cuh), and one
// barrier for the frontier before the masks.
#include <algorithm>

#include "core/block_topk.cuh"
#include "draft/expand_tree.h"
#include "draft/select_topk.h"

namespace specdec::draft {
namespace {

constexpr int kRootThreads = 256;
constexpr int kMaxRootBlocks = 64;  // per row

__global__ void __launch_bounds__(kRootThreads) expand_root_kernel(ExpandRootParams p) {
  begin_kernel();
  const int64_t b = blockIdx.x;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRootThreads + threadIdx.x;
#pragma unroll 1
  for (int64_t c = first; c < p.candidates; c += static_cast<int64_t>(gridDim.y) * kRootThreads)
    write_root_candidate(p, b, slot, c);
  if (first < p.k) write_root_frontier(p, b, slot, first);
}

constexpr int kMaskWords = 1024;  // of a row's masks, per pass

// Compute i / k for i < 64 * 64 and k <= 64 by a multiplication.
struct SmallDivisor {
  uint32_t inverse;
  __device__ explicit SmallDivisor(uint32_t k) : inverse(((1u << 18) + k - 1) / k) {}
  __device__ int divide(uint32_t i) const { return static_cast<int>(i * inverse >> 18); }
};

// kThreads * kChildren >= k * k. Masks are copied in chunks of 2^log2_columns words.
template <int kThreads, int kChildren>
__global__ void __launch_bounds__(kThreads) expand_tree_kernel(ExpandTreeParams p, int log2_columns) {
  static_assert(kMaskWords >= kMaxTopk && kThreads >= kMaxTopk);
  begin_kernel();
  __shared__ typename BlockTopk<kThreads>::Storage storage;
  __shared__ FrontierNode frontier[kMaxTopk];
  __shared__ int64_t masks[kMaskWords];
  __shared__ int32_t parents[kMaxTopk];

  const int64_t b = blockIdx.x;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int k = static_cast<int>(p.k), num_children = k * k, thread = static_cast<int>(threadIdx.x);
  const SmallDivisor by_k(k);

  const int words = static_cast<int>(p.mask_words), columns = 1 << log2_columns;
  int64_t* mask = p.mask + b * k * words;
  const auto for_each_mask_word = [&](int first, auto f) {  // f(row, word, index in `masks`)
#pragma unroll 1  // unrolled code is not in the instruction cache yet: short code is fast
    for (int e = thread; e < k << log2_columns; e += kThreads) {
      const int row = e >> log2_columns, word = first + (e & (columns - 1));
      if (word < words) f(row, word, e);
    }
  };
  const auto load_masks = [&](int first) {
    for_each_mask_word(first, [&](int row, int word, int e) { masks[e] = mask[row * words + word]; });
  };

  Child children[kChildren];
#pragma unroll
  for (int c = 0; c < kChildren; ++c)
    if (thread + c * kThreads < num_children) children[c] = read_child(p, b, thread + c * kThreads);
  if (thread < k) frontier[thread] = read_frontier(p, b, slot, thread);
  const int32_t position = child_position(p, slot);
  load_masks(0);
  __syncthreads();

  uint32_t keys[kChildren], best = 0;  // of scores; 0: no child
#pragma unroll
  for (int c = 0; c < kChildren; ++c) {
    const int i = thread + c * kThreads;
    keys[c] = i < num_children ? order_key(append_child(p, b, slot, frontier[by_k.divide(i)], i, children[c])) : 0;
    best = max(best, keys[c]);
  }

  BlockTopk<kThreads> topk(storage);
  const uint32_t pivot = topk.find_pivot(best, num_children >= kThreads, k);
  topk.collect(pivot, k, num_children, [&](uint32_t least, auto f) {
#pragma unroll
    for (int c = 0; c < kChildren; ++c)
      if (keys[c] >= least && keys[c] > 0) f(entry_key(keys[c], thread + c * kThreads));
  });
  topk.rank(k, [&](int j, uint64_t key) {
    const auto i = static_cast<int32_t>(key_id(key));
    parents[j] = by_k.divide(i);
    write_frontier(p, b, slot, j, i, position);
  });
  __syncthreads();

  for (int first = 0; first < words; first += columns) {  // columns are independent
    if (first > 0) {
      __syncthreads();
      load_masks(first);
      __syncthreads();
    }
    for_each_mask_word(first, [&](int j, int word, int e) {
      const int64_t of_parent = masks[(parents[j] << log2_columns) + (e & (columns - 1))];
      mask[j * words + word] = of_parent | static_cast<int64_t>(own_bit((p.step - 1) * k + j, word));
    });
  }
}

}  // namespace

void expand_root_cuda(const ExpandRootParams& p, Stream stream) {
  const auto columns =
      static_cast<unsigned>(std::min<int64_t>((p.candidates + kRootThreads - 1) / kRootThreads, kMaxRootBlocks));
  launch("expand_root", expand_root_kernel,
         {.grid = {grid_x("expand_root", p.batch), columns}, .threads = kRootThreads}, stream, p);
}

void expand_tree_cuda(const ExpandTreeParams& p, Stream stream) {
  int log2_columns = 0;
  while ((1 << log2_columns) < p.mask_words && p.k << (log2_columns + 1) <= kMaskWords) ++log2_columns;
  const auto start = [&]<int kThreads, int kChildren>() {
    launch("expand_tree", expand_tree_kernel<kThreads, kChildren>,
           {.grid = grid_x("expand_tree", p.batch), .threads = kThreads}, stream, p, log2_columns);
  };
  if (p.k * p.k <= 128)
    start.operator()<128, 1>();
  else if (p.k * p.k <= 512)
    start.operator()<512, 1>();
  else
    start.operator()<1024, kMaxTopk * kMaxTopk / 1024>();
}

}  // namespace specdec::draft
