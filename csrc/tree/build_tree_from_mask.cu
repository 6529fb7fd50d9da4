// One block a row, one thread a node: find the parents in the mask, into shared memory, then write each node. Latency
// bound.
#include "core/cuda.cuh"
#include "tree/build_tree_from_mask.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads >= kMaxTreeNodes, "one thread for each node");

__global__ void __launch_bounds__(kThreads) build_tree_from_mask_kernel(BuildTreeFromMaskParams p) {
  __shared__ int32_t parents[kMaxTreeNodes];
  const int64_t b = blockIdx.x, slot = slot_of(p.slots, b, p.num_slots), at = b * p.out.nodes;
  const int32_t nodes = static_cast<int32_t>(p.out.nodes), i = static_cast<int32_t>(threadIdx.x);

  int32_t count = slot < 0 ? 0 : p.num_nodes ? p.num_nodes[b] : nodes;
  bool bad = slot >= 0 && (count < 1 || count > nodes);
  if (!bad && i < count) {
    parents[i] = parent_in_mask(p.mask + at * p.out.words, p.out.words, i);
    bad = parents[i] == kNoParent;
  }
  if (__syncthreads_or(bad)) {
    if (i == 0) {
      set_status(p.status, slot, kBadTree);
      parents[0] = -1;
    }
    count = 1;
    __syncthreads();
  }
  if (i >= nodes) return;
  const TreeRow tree{parents, count, slot >= 0 ? p.tokens[at] : 0, slot >= 0 ? p.seq_lens[slot] : 0};
  write_node(p.out, b, i, tree, p.tokens[at + i]);
}

}  // namespace

void build_tree_from_mask_cuda(const BuildTreeFromMaskParams& p, Stream stream) {
  build_tree_from_mask_kernel<<<static_cast<unsigned>(p.batch), kThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("build_tree_from_mask");
}

}  // namespace specdec
