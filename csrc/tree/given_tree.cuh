// GPU kernel of build_tree_from_parents and build_tree_from_mask: one block per row, one thread per node.
//
// Each thread finds and checks its node's parent, then tree_nodes.cuh writes the tree. Reads 4 bytes per node and the
// data that the parents come from, writes 20 + 8 W bytes per node. Latency bound.
#pragma once

#include "tree/given_tree.h"
#include "tree/tree_nodes.cuh"

namespace specdec::tree {

template <class Params, int kWords>
__global__ void __launch_bounds__(64 * kWords) given_tree_kernel(Params p) {
  begin_kernel();
  __shared__ TreeNodes<kWords> nodes;
  const int64_t b = blockIdx.x;
  const auto i = static_cast<int32_t>(threadIdx.x);

  clear_nodes(nodes);
  const int32_t given = i < p.out.nodes ? p.node_parent(b, i) : -1;  // no load here waits for the slot
  const int32_t token = i < p.out.nodes ? p.tokens[b * p.out.nodes + i] : 0;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  TreeHead row = given_head(p, b, slot);

  const bool valid = slot < 0 || (is_count(p, row.count) && (i >= row.count || given != kNoParent));
  if (__syncthreads_or(!valid)) {  // keep only the root
    if (i == 0) set_status(p.status, slot, kBadTree);
    row.count = 1;
  }
  write_nodes(p.out, b, row, token, i == 0 ? -1 : given, nodes);
}

template <class Params>
void start_given_tree(const char* op, const Params& p, Stream stream) {
  const auto threads = static_cast<unsigned>((p.out.nodes + kWarp - 1) / kWarp * kWarp);
  const LaunchShape shape{.grid = grid_x(op, p.batch), .threads = threads};
  if (p.out.words == 1)
    launch(op, given_tree_kernel<Params, 1>, shape, stream, p);
  else
    launch(op, given_tree_kernel<Params, kMaxTreeNodes / 64>, shape, stream, p);
}

}  // namespace specdec::tree
