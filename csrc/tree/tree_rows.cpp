#include "tree/tree_rows.h"

namespace specdec {

TreeOut check_tree_out(Check& check, Dim& batch, Dim& nodes, const TensorView& out_tokens,
                       const TensorView& out_parents, const TensorView& out_positions,
                       const TensorView& out_first_child, const TensorView& out_next_sibling,
                       const TensorView& out_mask, const TensorView& out_num_nodes) {
  Dim words{"mask_words", (nodes + 63) / 64};
  check.output("out_tokens", out_tokens, {batch, nodes}, kInt32);
  check.output("out_parents", out_parents, {batch, nodes}, kInt32);
  check.output("out_positions", out_positions, {batch, nodes}, kInt32);
  check.output("out_first_child", out_first_child, {batch, nodes}, kInt32);
  check.output("out_next_sibling", out_next_sibling, {batch, nodes}, kInt32);
  check.output("out_mask", out_mask, {batch, nodes, words}, kInt64);
  check.output("out_num_nodes", out_num_nodes, {batch}, kInt32);
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

}  // namespace specdec
