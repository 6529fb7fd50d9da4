// build_tree_from_parents: compute links, mask and positions of an external tree given as parent indices.
#pragma once

#include "tree/given_tree.h"

namespace specdec::tree {

struct BuildTreeFromParentsParams : GivenTree {
  const int32_t* parents;  // [batch, nodes], node 0: -1

  // Return node i's parent, or kNoParent: only node 0 is a root, and a parent comes before its children.
  SD_HD int32_t node_parent(int64_t b, int32_t i) const {
    const int32_t parent = parents[b * out.nodes + i];
    return (i == 0 ? parent == -1 : parent >= 0 && parent < i) ? parent : kNoParent;
  }
};

void build_tree_from_parents(CallStream stream, const TensorView& tokens, const TensorView& parents,
                             const TensorView& seq_lens, const OptTensor& num_nodes, const OptTensor& slots,
                             const OptTensor& status, const TensorView& out_tokens, const TensorView& out_parents,
                             const TensorView& out_positions, const TensorView& out_first_child,
                             const TensorView& out_next_sibling, const TensorView& out_mask,
                             const TensorView& out_num_nodes);

void build_tree_from_parents_cpu(const BuildTreeFromParentsParams& p);
void build_tree_from_parents_cuda(const BuildTreeFromParentsParams& p, Stream stream);

}  // namespace specdec::tree
