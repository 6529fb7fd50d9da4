// What build_tree_from_parents and build_tree_from_mask share: a tree from elsewhere, accepted as a whole or refused.
//
// The params of both derive from GivenTree and say, as node_parent(b, i), which parent node i of row b has: -1 for
// node 0, a lower node for any other, or kNoParent where what was given is no tree.
#pragma once

#include "core/dispatch.h"
#include "core/slots.h"
#include "tree/tree_rows.h"

namespace specdec::tree {

constexpr int32_t kNoParent = -2;

struct GivenTree {
  const int32_t* tokens;     // [batch, nodes]
  const int32_t* seq_lens;   // [num_slots]
  const int32_t* num_nodes;  // [batch] or null: all of them
  const int32_t* slots;      // [batch] or null
  int32_t* status;           // [num_slots] or null
  TreeOut out;
  int64_t batch, num_slots;
};

// Checks what follows the tree itself in both signatures, and gathers it all; batch and nodes are bound.
GivenTree check_given_tree(Check& check, Dim& batch, Dim& nodes, const TensorView& tokens, const TensorView& seq_lens,
                           const OptTensor& num_nodes, const OptTensor& slots, const OptTensor& status,
                           const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
                           const TensorView& out_first_child, const TensorView& out_next_sibling,
                           const TensorView& out_mask, const TensorView& out_num_nodes);

// What row b claims; nothing for an empty row.
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
    bool sound = slot < 0 || is_count(p, row.count);
    for (int32_t i = 0; sound && i < row.count; ++i) {
      parents[i] = p.node_parent(b, i);
      sound = parents[i] != kNoParent;
    }
    if (!sound) {  // the root alone
      set_status(p.status, slot, kBadTree);
      parents[0] = -1;
      row.count = 1;
    }
    write_row(p.out, b, row);
  }
}

}  // namespace specdec::tree
