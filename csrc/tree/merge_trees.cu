// merge_trees on a GPU: one block per row, one thread per candidate.
//
// The block copies both trees to smem; each thread hashes its path to the root, finds the first node with the same
// path, then counts the nodes that rank higher. Time goes into two passes over the candidates in smem and a few
// barriers. Reads 16 bytes per node of either tree, writes 24 + 8 W bytes per node. Latency bound.
#include "core/exact_math.h"
#include "tree/merge_trees.h"
#include "tree/tree_nodes.cuh"

namespace specdec::tree {
namespace {

constexpr int kMaxCandidates = 2 * kMaxTreeNodes;

// Copy a row with the block, to be read after a barrier. The counts stay those of the original.
__device__ __forceinline__ ScoredRow copy_row(const ScoredRow& row, int32_t* tokens, int32_t* parents, float* scores) {
  for (int32_t i = threadIdx.x; i < row.count; i += blockDim.x) {
    tokens[i] = row.tokens[i];
    parents[i] = row.parents[i];
    scores[i] = row.scores[i];
  }
  return {tokens, parents, scores, row.count, row.position};
}

template <int kWords>
__global__ void __launch_bounds__(kMaxCandidates) merge_trees_kernel(MergeTreesParams p) {
  begin_kernel();
  __shared__ int32_t tokens[kMaxCandidates], parents[kMaxCandidates];
  __shared__ float scores[kMaxCandidates];
  __shared__ uint64_t paths[kMaxCandidates], ranks[kMaxCandidates];
  __shared__ uint32_t score_keys[kMaxCandidates];
  __shared__ int32_t representative[kMaxCandidates], place[kMaxCandidates], chosen[kMaxTreeNodes];
  __shared__ TreeNodes<kWords> nodes;
  const auto i = static_cast<int32_t>(threadIdx.x), most = static_cast<int32_t>(p.out.nodes);
  const int64_t row = blockIdx.x;
  RowPair pair = row_pair(p, row);
  const TreeHead root = pair.head();
  const int32_t candidates = pair.candidates();
  pair.a = copy_row(pair.a, tokens, parents, scores);
  pair.b = copy_row(pair.b, tokens + kMaxTreeNodes, parents + kMaxTreeNodes, scores + kMaxTreeNodes);
  clear_nodes(nodes);
  __syncthreads();

  PathNode own{0, -INFINITY};
  if (i < candidates) {
    own = path_node(pair.row_of(i), pair.node_of(i));
    paths[i] = own.path;
    score_keys[i] = order_key(own.score);
  }
  __syncthreads();
  int32_t same = i;  // first candidate with this path
  if (own.path != 0) {
#pragma unroll 8
    for (int32_t c = i - 1; c >= 0; --c) same = paths[c] == own.path ? c : same;
  }
  if (i < candidates) representative[i] = same;
  if (same != i) atomicMax(&score_keys[same], order_key(own.score));
  __syncthreads();
  const bool counts = own.path != 0 && same == i;
  const uint64_t rank = counts ? uint64_t{score_keys[i]} << 32 | ~static_cast<uint32_t>(i) : 0;
  if (i < candidates) ranks[i] = rank;  // by score, then by index
  __syncthreads();

  int32_t better = most;  // count of better candidates
  if (counts) {
    better = 0;
#pragma unroll 8
    for (int32_t c = 0; c < candidates; ++c) better += ranks[c] > rank;
    place[i] = 1 + better;
    if (better < most - 1) chosen[better] = i;
  }
  const int found = __syncthreads_count(better < most - 1);

  TreeHead head = root;
  if (head.count > 0) head.count += found;
  int32_t token = head.root_token, parent = -1;
  float score = i == 0 && head.count > 0 ? 0 : -INFINITY;
  if (i > 0 && i < head.count) {
    const int32_t c = chosen[i - 1], above = pair.parent_of(c);
    token = pair.row_of(c).tokens[pair.node_of(c)];
    parent = above < 0 ? 0 : place[representative[above]];
    score = key_float(score_keys[c]);
  }
  if (i < most) p.out_scores[row * p.out.nodes + i] = score;
  write_nodes(p.out, row, head, token, parent, nodes);
}

}  // namespace

void merge_trees_cuda(const MergeTreesParams& p, Stream stream) {
  const int64_t candidates = p.a.nodes + p.b.nodes, threads = candidates > p.out.nodes ? candidates : p.out.nodes;
  const LaunchShape shape{.grid = grid_x("merge_trees", p.batch),
                          .threads = static_cast<unsigned>((threads + kWarp - 1) / kWarp * kWarp)};
  if (p.out.words == 1)
    launch("merge_trees", merge_trees_kernel<1>, shape, stream, p);
  else
    launch("merge_trees", merge_trees_kernel<kMaxTreeNodes / 64>, shape, stream, p);
}

}  // namespace specdec::tree
