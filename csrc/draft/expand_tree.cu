// expand_root: one block a row, every thread writes its columns; 12 bytes a candidate and 8 a mask word.
//
// expand_tree: one block a row. The k * k children are scored, appended and ranked tile by tile (block_best_list.cuh);
// then the k best become the frontier. About 28 bytes a child, so launch latency is all there is for usual k.
#include "draft/block_best_list.cuh"
#include "draft/expand_tree.h"
#include "draft/select_topk.h"

namespace specdec {
namespace {

constexpr int kThreads = 128;
static_assert(kThreads >= kMaxTopk, "one thread for each frontier node");

__global__ void __launch_bounds__(kThreads) expand_root_kernel(ExpandRootParams p) {
  const int64_t b = blockIdx.x;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  for (int64_t c = threadIdx.x; c < p.candidates; c += kThreads) write_root_candidate(p, b, slot, c);
  if (threadIdx.x < p.k) write_root_frontier(p, b, slot, threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) expand_tree_kernel(ExpandTreeParams p) {
  using List = BlockBestList<kThreads, kMaxTopk>;
  __shared__ typename List::Storage storage;
  __shared__ FrontierNode frontier[kMaxTopk];

  const int64_t b = blockIdx.x;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int k = static_cast<int>(p.k), children = k * k, j = static_cast<int>(threadIdx.x);

  if (j < k) frontier[j] = read_frontier(p, b, slot, j);
  __syncthreads();

  List best(storage, k);
  for (int first = 0; first < children; first += kThreads) {
    const int i = first + j;
    const bool present = i < children;
    const float score = present ? append_child(p, b, slot, frontier[i / k], i) : 0.0f;
    best.offer(min(kThreads, children - first), present, score, i);
  }

  // The list ends in a barrier, so the old frontier has been read by all.
  if (j < k) write_frontier(p, b, slot, j, best.numbers()[j]);
  int64_t* mask = p.mask + b * p.k * p.mask_words;
  for (int64_t w = 0; w < p.mask_words; ++w) {
    int64_t bits = 0;
    if (j < k)
      bits = mask[best.numbers()[j] / k * p.mask_words + w] | static_cast<int64_t>(own_bit((p.step - 1) * k + j, w));
    __syncthreads();  // every parent's word is read before any is replaced; words do not depend on each other
    if (j < k) mask[j * p.mask_words + w] = bits;
  }
}

}  // namespace

void expand_root_cuda(const ExpandRootParams& p, Stream stream) {
  expand_root_kernel<<<grid_x("expand_root", p.batch), kThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("expand_root");
}

void expand_tree_cuda(const ExpandTreeParams& p, Stream stream) {
  expand_tree_kernel<<<grid_x("expand_tree", p.batch), kThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("expand_tree");
}

}  // namespace specdec
