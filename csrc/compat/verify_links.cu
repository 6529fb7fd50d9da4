// verify_tree_greedy and tree_speculative_sampling_target_only on a GPU: one block per request.
//
// The block loads its nodes (greedy: and the target's tokens after them) into smem in parallel, so that the walk waits
// for no link. A greedy walk then runs in one thread. A sampled walk reads one probability per tested node and, at the
// end, one row of the target's and of the draft's probabilities (8 bytes x vocab); all threads take the same steps.
#include "compat/block_rows.cuh"
#include "compat/verify_links.h"

namespace specdec::compat {
namespace {

constexpr int kWalkThreads = 128;

template <class Params>
__device__ void copy_nodes(const Params& p, int64_t b, LinkedNode* nodes) {
  for (int i = static_cast<int>(threadIdx.x); i < p.links.nodes; i += static_cast<int>(blockDim.x))
    nodes[i] = read_linked_node(p, b, i);
}

__global__ void __launch_bounds__(kWalkThreads) greedy_kernel(VerifyTreeGreedyParams p) {
  begin_kernel();
  __shared__ LinkedNode nodes[kMaxWalkedNodes];
  __shared__ int64_t targets[kMaxWalkedNodes];
  const int64_t b = blockIdx.x;
  copy_nodes(p, b, nodes);
  for (int i = static_cast<int>(threadIdx.x); i < p.links.nodes; i += kWalkThreads) targets[i] = p.target_of(b, i);
  __syncthreads();
  if (threadIdx.x == 0) walk_greedy(p, b, [&](int64_t i) { return nodes[i]; }, [&](int64_t i) { return targets[i]; });
}

__global__ void __launch_bounds__(BlockRows::kThreads) sampled_kernel(TreeSamplingParams p) {
  begin_kernel();
  __shared__ LinkedNode nodes[kMaxWalkedNodes];
  __shared__ BlockRows::Storage storage;
  const int64_t b = blockIdx.x;
  copy_nodes(p, b, nodes);
  __syncthreads();
  BlockRows rows(storage);
  walk_sampled(p, b, [&](int64_t i) { return nodes[i]; }, rows);
}

}  // namespace

void verify_tree_greedy_cuda(const VerifyTreeGreedyParams& p, Stream stream) {
  const unsigned blocks = grid_x("verify_tree_greedy", p.links.batch);
  launch("verify_tree_greedy", greedy_kernel, {.grid = blocks, .threads = kWalkThreads}, stream, p);
}

void tree_speculative_sampling_target_only_cuda(const TreeSamplingParams& p, Stream stream) {
  constexpr const char* kOp = "tree_speculative_sampling_target_only";
  const LaunchShape shape{.grid = grid_x(kOp, p.links.batch), .threads = BlockRows::kThreads};
  launch(kOp, sampled_kernel, shape, stream, p);
}

}  // namespace specdec::compat
