// Code shared by build_tree_from_parents and build_tree_from_mask: an external tree is accepted as a whole or rejected.
//
// The params of both derive from GivenTree and define node_parent(b, i), the parent of node i of row b: -1 for node 0,
// a lower node for any other, or kNoParent if the input is no tree.
#pragma once

#include "core/dispatch.h"
#include "core/slots.h"
#include "tree/tree_rows.h"

namespace specdec::tree {

constexpr int32_t kNoParent = -2;

struct GivenTree {
  const int32_t* tokens;     // [batch, nodes]
  const int32_t* seq_lens;   // [num_slots]
  const int32_t* num_nodes;  // [batch] or null: all nodes
  const int32_t* slots;      // [batch] or null
  int32_t* status;           // [num_slots] or null
  TreeOut out;
  int64_t batch, num_slots;
};

// Check the arguments that follow the tree in both signatures and gather them; batch and nodes are bound.
GivenTree check_given_tree(Check& check, Dim& batch, Dim& nodes, const TensorView& tokens, const TensorView& seq_lens,
                           const OptTensor& num_nodes, const OptTensor& slots, const OptTensor& status,
                           const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
                           const TensorView& out_first_child, const TensorView& out_next_sibling,
                           const TensorView& out_mask, const TensorView& out_num_nodes);

// Return the head that row b claims; an empty one for an empty row.
SD_HD TreeHead given_head(const GivenTree& p, int64_t b, int64_t slot) {
  if (slot < 0) return {};
  return {.count = p.num_nodes ? p.num_nodes[b] : static_cast<int32_t>(p.out.nodes),
          .root_token = p.tokens[b * p.out.nodes],
          .seq_len = p.seq_lens[slot]};
}

SD_HD bool is_count(const GivenTree& p, int32_t count) { return count >= 1 && count <= p.out.nodes; }

template <class Params>
void build_given_trees(const Params& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_of(p.slots, b, p.num_slots);
    int32_t parents[kMaxTreeNodes];
    TreeRow row{given_head(p, b, slot), p.tokens + b * p.out.nodes, parents};
    bool valid = slot < 0 || is_count(p, row.count);
    for (int32_t i = 0; valid && i < row.count; ++i) {
      parents[i] = p.node_parent(b, i);
      valid = parents[i] != kNoParent;
    }
    if (!valid) {  // keep only the root
      set_status(p.status, slot, kBadTree);
      parents[0] = -1;
      row.count = 1;
    }
    write_row(p.out, b, row);
  }
}

}  // namespace specdec::tree
