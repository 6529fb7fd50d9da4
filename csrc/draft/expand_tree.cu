// expand_root: every thread writes its columns; 12 bytes a candidate and 8 a mask word.
//
// expand_tree: one block a row. About 28 bytes a child, so what counts is how many latencies follow each other: all
// loads but one (the parents' scores) start at once, then come one barrier for the scores, the ranking
// (block_topk.cuh), and one barrier for the frontier before the masks.
#include <algorithm>

#include "core/block_topk.cuh"
#include "draft/expand_tree.h"
#include "draft/select_topk.h"

namespace specdec {
namespace {

constexpr int kRootThreads = 256;
constexpr int kMaxRootBlocks = 64;  // a row

__global__ void __launch_bounds__(kRootThreads) expand_root_kernel(ExpandRootParams p) {
  begin_kernel();
  const int64_t b = blockIdx.x;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRootThreads + threadIdx.x;
  for (int64_t c = first; c < p.candidates; c += static_cast<int64_t>(gridDim.y) * kRootThreads)
    write_root_candidate(p, b, slot, c);
  if (first < p.k) write_root_frontier(p, b, slot, first);
}

constexpr int kMaskWords = 1024;  // of a row's masks, at a time

// kThreads * kChildren >= k * k.
template <int kThreads, int kChildren>
__global__ void __launch_bounds__(kThreads) expand_tree_kernel(ExpandTreeParams p) {
  static_assert(kMaskWords >= kMaxTopk && kThreads >= kMaxTopk);
  using Topk = BlockTopk<kThreads>;
  begin_kernel();
  __shared__ typename Topk::Storage storage;
  __shared__ FrontierNode frontier[kMaxTopk];
  __shared__ int64_t masks[kMaskWords];
  __shared__ int32_t chosen[kMaxTopk];

  const int64_t b = blockIdx.x;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int k = static_cast<int>(p.k), num_children = k * k, thread = static_cast<int>(threadIdx.x);

  // A block of columns of the old masks, as wide as fits.
  const int words = static_cast<int>(p.mask_words), columns = min(words, kMaskWords / k);
  int64_t* mask = p.mask + b * k * words;
  const auto load_masks = [&](int first) {
    for (int e = thread; e < k * columns; e += kThreads)
      if (first + e % columns < words) masks[e] = mask[static_cast<int64_t>(e / columns) * words + first + e % columns];
  };

  Child children[kChildren];
#pragma unroll
  for (int c = 0; c < kChildren; ++c) {
    const int i = thread + c * kThreads;
    if (i < num_children) children[c] = read_child(p, b, i);
  }
  if (thread < k) frontier[thread] = read_frontier(p, b, slot, thread);
  const int32_t position = child_position(p, slot);
  load_masks(0);
  __syncthreads();

  uint32_t keys[kChildren], best = 0;  // of scores
#pragma unroll
  for (int c = 0; c < kChildren; ++c) {
    const int i = thread + c * kThreads;
    keys[c] = i < num_children ? order_key(append_child(p, b, slot, frontier[i / k], i, children[c])) : 0;
    best = max(best, keys[c]);
  }

  Topk topk(storage);
  if (kChildren == 1) {
    topk.list_all(num_children, entry_key(keys[0], thread));
  } else {
    const uint32_t pivot = topk.find_pivot(best, min(num_children, kThreads), k);
    topk.collect(pivot, k, num_children, [&](uint32_t least, auto f) {
#pragma unroll
      for (int c = 0; c < kChildren; ++c)
        if (keys[c] >= least && keys[c] > 0) f(entry_key(keys[c], thread + c * kThreads));
    });
  }
  topk.emit_best(k, [&](int j, uint64_t key) {
    const int32_t i = static_cast<int32_t>(key_number(key));
    chosen[j] = i;
    write_frontier(p, b, slot, j, i, position);
  });
  __syncthreads();

  for (int first = 0; first < words; first += columns) {  // columns do not depend on each other
    if (first > 0) {
      __syncthreads();
      load_masks(first);
      __syncthreads();
    }
    for (int e = thread; e < k * columns; e += kThreads) {
      const int j = e / columns, w = first + e % columns;
      if (w < words)
        mask[static_cast<int64_t>(j) * words + w] =
            masks[chosen[j] / k * columns + e % columns] | static_cast<int64_t>(own_bit((p.step - 1) * k + j, w));
    }
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
  const bool small = p.k * p.k <= 128;
  launch("expand_tree", small ? expand_tree_kernel<128, 1> : expand_tree_kernel<512, kMaxTopk * kMaxTopk / 512>,
         {.grid = grid_x("expand_tree", p.batch), .threads = small ? 128u : 512u}, stream, p);
}

}  // namespace specdec
