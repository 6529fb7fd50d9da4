// The kernel of build_tree_from_parents and build_tree_from_mask. One block a row, one thread a node: find and check
// the parents, into shared memory, then write each node. Reads 4 bytes a node and what the parents are found in, writes
// 20 + 8 W bytes a node; latency bound.
#pragma once

#include "tree/given_tree.h"
#include "tree/tree_nodes.cuh"

namespace specdec {

constexpr int kGivenTreeThreads = 256;
static_assert(kGivenTreeThreads >= kMaxTreeNodes, "one thread for each node");

template <class Params>
__global__ void __launch_bounds__(kGivenTreeThreads) given_tree_kernel(Params p) {
  __shared__ int32_t parents[kMaxTreeNodes];
  const int64_t b = blockIdx.x, slot = slot_of(p.slots, b, p.num_slots);
  const int32_t i = static_cast<int32_t>(threadIdx.x);

  TreeRow row = given_row(p, b, slot, parents);
  bool sound = slot < 0 || is_count(p, row.count);
  if (sound && i < row.count) {
    parents[i] = p.node_parent(b, i);
    sound = parents[i] != kNoParent;
  }
  if (__syncthreads_or(!sound)) {  // the root alone
    if (i == 0) {
      set_status(p.status, slot, kBadTree);
      parents[0] = -1;
    }
    row.count = 1;
    __syncthreads();
  }
  if (i < p.out.nodes) write_node(p.out, b, i, row);
}

}  // namespace specdec
