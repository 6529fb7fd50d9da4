// pack_trees on a GPU: one block per request with one thread per node, followed by blocks with one thread per packed
// row.
//
// Reads and writes 24 + 8 W bytes per node. Latency bound.
#include "core/cuda.cuh"
#include "tree/pack_trees.h"

namespace specdec::tree {
namespace {

constexpr int kThreads = kMaxTreeNodes;

__global__ void __launch_bounds__(kThreads) pack_trees_kernel(PackTreesParams p) {
  begin_kernel();
  const int64_t b = blockIdx.x;
  if (b >= p.batch) {
    const int64_t row = (b - p.batch) * blockDim.x + threadIdx.x;
    if (row < p.num_rows) pack_row(p, row);
    return;
  }
  const int32_t kept = num_kept(p, b), root = p.tree.tokens[b * p.tree.nodes];
  const int32_t position = p.tree.positions[b * p.tree.nodes], i = static_cast<int32_t>(threadIdx.x);
  __syncthreads();  // all threads have read what changes below
  if (i < p.tree.nodes) cut_node(p, b, i, kept, root, position);
  if (i == 0) p.tree.num_nodes[b] = kept;
}

}  // namespace

void pack_trees_cuda(const PackTreesParams& p, Stream stream) {
  const unsigned threads = (static_cast<unsigned>(p.tree.nodes) + kWarp - 1) / kWarp * kWarp;
  const int64_t row_blocks = (p.num_rows + threads - 1) / threads;
  launch("pack_trees", pack_trees_kernel, {.grid = grid_x("pack_trees", p.batch + row_blocks), .threads = threads},
         stream, p);
}

}  // namespace specdec::tree
