// Tree rows on the CPU, and the checks of their tensors.
#include "tree/tree_rows.h"

#include <algorithm>

#include "core/bits.h"

namespace specdec::tree {

void write_row(const TreeOut& out, int64_t b, const TreeRow& row) {
  const int64_t at = b * out.nodes;
  int32_t *positions = out.positions + at, *first_child = out.first_child + at, *next_sibling = out.next_sibling + at;
  int64_t* mask = out.mask + at * out.words;
  std::fill_n(std::copy_n(row.tokens, row.count, out.tokens + at), out.nodes - row.count, row.root_token);
  std::fill_n(std::copy_n(row.parents, row.count, out.parents + at), out.nodes - row.count, -1);
  std::fill_n(positions, out.nodes, static_cast<int32_t>(row.seq_len));
  std::fill_n(first_child, out.nodes, -1);
  std::fill_n(next_sibling, out.nodes, -1);
  std::fill_n(mask, out.nodes * out.words, 0);
  out.num_nodes[b] = row.count;

  int32_t last_child[kMaxTreeNodes];
  for (int32_t i = 0; i < out.nodes; ++i) {
    last_child[i] = -1;
    if (i > 0 && i < row.count) {
      const int32_t parent = row.parents[i];
      std::copy_n(mask + parent * out.words, out.words, mask + i * out.words);
      positions[i] = static_cast<int32_t>(int64_t{positions[parent]} + 1);  // an invalid length may overflow int32
      (last_child[parent] < 0 ? first_child[parent] : next_sibling[last_child[parent]]) = i;
      last_child[parent] = i;
    }
    mask[i * out.words + i / 64] |= static_cast<int64_t>(own_bit(i, i / 64));
  }
}

TreeOut check_tree_out(Check& check, const TreeNames& names, Dim& batch, Dim& nodes, const TensorView& out_tokens,
                       const TensorView& out_parents, const TensorView& out_positions,
                       const TensorView& out_first_child, const TensorView& out_next_sibling,
                       const TensorView& out_mask, const TensorView& out_num_nodes) {
  Dim words{"mask_words", (nodes + 63) / 64};
  check.output(names.tokens, out_tokens, {batch, nodes}, kInt32);
  check.output(names.parents, out_parents, {batch, nodes}, kInt32);
  check.output(names.positions, out_positions, {batch, nodes}, kInt32);
  check.output(names.first_child, out_first_child, {batch, nodes}, kInt32);
  check.output(names.next_sibling, out_next_sibling, {batch, nodes}, kInt32);
  check.output(names.mask, out_mask, {batch, nodes, words}, kInt64);
  check.output(names.num_nodes, out_num_nodes, {batch}, kInt32);
  return {
      .tokens = out_tokens.data<int32_t>(),
      .parents = out_parents.data<int32_t>(),
      .positions = out_positions.data<int32_t>(),
      .first_child = out_first_child.data<int32_t>(),
      .next_sibling = out_next_sibling.data<int32_t>(),
      .mask = out_mask.data<int64_t>(),
      .num_nodes = out_num_nodes.data<int32_t>(),
      .nodes = nodes,
      .words = words,
  };
}

}  // namespace specdec::tree
