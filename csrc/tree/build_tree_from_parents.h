// build_tree_from_parents: links, mask and positions of a tree that comes from elsewhere as parent pointers.
#pragma once

#include "core/dispatch.h"
#include "core/slots.h"
#include "tree/tree_rows.h"

namespace specdec {

struct BuildTreeFromParentsParams {
  const int32_t* tokens;     // [batch, nodes]
  const int32_t* parents;    // [batch, nodes], node 0: -1
  const int32_t* seq_lens;   // [num_slots]
  const int32_t* num_nodes;  // [batch] or null: all of them
  const int32_t* slots;      // [batch] or null
  int32_t* status;           // [num_slots] or null
  TreeOut out;
  int64_t batch, num_slots;
};

// Whether node i may have this parent: node 0 alone is a root, and a parent comes before its children.
SD_HD bool is_parent(int32_t parent, int32_t i) { return i == 0 ? parent == -1 : parent >= 0 && parent < i; }

void build_tree_from_parents(CallStream stream, const TensorView& tokens, const TensorView& parents,
                             const TensorView& seq_lens, const OptTensor& num_nodes, const OptTensor& slots,
                             const OptTensor& status, const TensorView& out_tokens, const TensorView& out_parents,
                             const TensorView& out_positions, const TensorView& out_first_child,
                             const TensorView& out_next_sibling, const TensorView& out_mask,
                             const TensorView& out_num_nodes);

void build_tree_from_parents_cpu(const BuildTreeFromParentsParams& p);
void build_tree_from_parents_cuda(const BuildTreeFromParentsParams& p, Stream stream);

}  // namespace specdec
