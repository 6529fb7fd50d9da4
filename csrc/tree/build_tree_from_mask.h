// build_tree_from_mask: compute links, mask and positions of an external tree given as an ancestor mask.
#pragma once

#include "core/bits.h"
#include "tree/given_tree.h"

namespace specdec::tree {

struct BuildTreeFromMaskParams : GivenTree {
  const int64_t* mask;  // [batch, nodes, words], 64-bit patterns

  SD_HD uint64_t word(int64_t b, int64_t i, int64_t w) const {
    return static_cast<uint64_t>(mask[(b * out.nodes + i) * out.words + w]);
  }

  // Return the highest set bit of row i below i, if the row is its parent's row plus its own bit. If no row up to i is
  // rejected, they form a tree: row 0 has bit 0, so by induction each row has it and is closed under ancestors.
  SD_HD int32_t node_parent(int64_t b, int32_t i) const {
    int64_t parent = -1;
    for (int64_t w = 0; w < out.words; ++w) {
      const uint64_t bits = word(b, i, w), below = bits & low_bits(i - 64 * w);
      if ((bits & ~below) != own_bit(i, w)) return kNoParent;
      if (below != 0) parent = 64 * w + highest_bit(below);
    }
    if (i == 0) return -1;
    if (parent < 0) return kNoParent;
    for (int64_t w = 0; w < out.words; ++w)
      if (word(b, i, w) != (word(b, parent, w) | own_bit(i, w))) return kNoParent;
    return static_cast<int32_t>(parent);
  }
};

void build_tree_from_mask(CallStream stream, const TensorView& tokens, const TensorView& mask,
                          const TensorView& seq_lens, const OptTensor& num_nodes, const OptTensor& slots,
                          const OptTensor& status, const TensorView& out_tokens, const TensorView& out_parents,
                          const TensorView& out_positions, const TensorView& out_first_child,
                          const TensorView& out_next_sibling, const TensorView& out_mask,
                          const TensorView& out_num_nodes);

void build_tree_from_mask_cpu(const BuildTreeFromMaskParams& p);
void build_tree_from_mask_cuda(const BuildTreeFromMaskParams& p, Stream stream);

}  // namespace specdec::tree
