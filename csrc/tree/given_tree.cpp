// Argument checks shared by build_tree_from_parents and build_tree_from_mask.
#include "tree/given_tree.h"

namespace specdec::tree {

GivenTree check_given_tree(Check& check, Dim& batch, Dim& nodes, const TensorView& tokens, const TensorView& seq_lens,
                           const OptTensor& num_nodes, const OptTensor& slots, const OptTensor& status,
                           const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
                           const TensorView& out_first_child, const TensorView& out_next_sibling,
                           const TensorView& out_mask, const TensorView& out_num_nodes) {
  Dim num_slots{"num_slots"};
  check.tensor("seq_lens", seq_lens, {num_slots}, kInt32);
  check.tensor("num_nodes", num_nodes, {batch}, kInt32);
  check.slots(slots, batch, num_slots);
  check.output("status", status, {num_slots}, kInt32);
  return {
      .tokens = tokens.data<const int32_t>(),
      .seq_lens = seq_lens.data<const int32_t>(),
      .num_nodes = data_or_null<const int32_t>(num_nodes),
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .out = check_tree_out(check, kOutTree, batch, nodes, out_tokens, out_parents, out_positions, out_first_child,
                            out_next_sibling, out_mask, out_num_nodes),
      .batch = batch,
      .num_slots = num_slots,
  };
}

}  // namespace specdec::tree
