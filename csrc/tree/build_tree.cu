// One block a row, in three phases: look for malformed candidates, rank the rest tile by tile (block_best_list.cuh),
// then one thread a node writes everything about it from the parents in shared memory. Reads 12 bytes a candidate,
// writes 20 + 8 W bytes a node; latency bound.
#include "draft/block_best_list.cuh"
#include "tree/build_tree.h"
#include "tree/tree_nodes.cuh"

namespace specdec {
namespace {

constexpr int kThreads = 512;
static_assert(kThreads >= kMaxTreeNodes, "one thread for each node");

__global__ void __launch_bounds__(kThreads) build_tree_kernel(BuildTreeParams p) {
  using List = BlockBestList<kThreads, kMaxTreeNodes>;
  __shared__ typename List::Storage storage;
  __shared__ int32_t tokens[kMaxTreeNodes], parents[kMaxTreeNodes];

  const int64_t b = blockIdx.x;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int64_t candidates = slot >= 0 ? p.candidates : 0;
  const CandidateRow row = candidate_row(p, b);
  const int nodes = static_cast<int>(p.out.nodes), i = static_cast<int>(threadIdx.x);

  bool found = false;
  for (int64_t c = i; c < candidates; c += kThreads) found |= row.malformed(c);
  const bool malformed = __syncthreads_or(found);
  if (malformed && i == 0) set_status(p.status, slot, kBadTree);

  List best(storage, nodes - 1);
  for (int64_t first = 0; first < candidates; first += kThreads) {
    const int64_t c = first + i, left = candidates - first;
    const float score = c < candidates ? row.rank_score(c) : -INFINITY;
    const bool present = score > -INFINITY && (!malformed || row.reaches_root(c, nodes - 1));
    best.offer(left < kThreads ? static_cast<int>(left) : kThreads, present, score, static_cast<int32_t>(c));
  }

  TreeRow tree{tokens, parents};
  if (slot >= 0) {
    tree.count = 1 + best.count();
    tree.root_token = p.root_tokens[slot];
    tree.seq_len = p.seq_lens[slot];
  }
  if (i < tree.count) {
    tokens[i] = i == 0 ? tree.root_token : row.tokens[best.numbers()[i - 1]];
    parents[i] = parent_node(row, best.numbers(), i);
  }
  __syncthreads();
  if (i < nodes) write_node(p.out, b, i, tree);
}

}  // namespace

void build_tree_cuda(const BuildTreeParams& p, Stream stream) {
  build_tree_kernel<<<grid_x("build_tree", p.batch), kThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("build_tree");
}

}  // namespace specdec
