// build_tree_from_parents: argument checks and the CPU implementation.
#include "tree/build_tree_from_parents.h"

namespace specdec::tree {

void build_tree_from_parents(CallStream stream, const TensorView& tokens, const TensorView& parents,
                             const TensorView& seq_lens, const OptTensor& num_nodes, const OptTensor& slots,
                             const OptTensor& status, const TensorView& out_tokens, const TensorView& out_parents,
                             const TensorView& out_positions, const TensorView& out_first_child,
                             const TensorView& out_next_sibling, const TensorView& out_mask,
                             const TensorView& out_num_nodes) {
  Check check("build_tree_from_parents");
  Dim B{"batch"}, N{"nodes"};
  check.tensor("tokens", tokens, {B, N}, kInt32);
  check.range("nodes", N, 1, kMaxTreeNodes);
  check.tensor("parents", parents, {B, N}, kInt32);
  const GivenTree given =
      check_given_tree(check, B, N, tokens, seq_lens, num_nodes, slots, status, out_tokens, out_parents, out_positions,
                       out_first_child, out_next_sibling, out_mask, out_num_nodes);
  if (B == 0) return;

  const BuildTreeFromParentsParams params{given, parents.data<const int32_t>()};
  SD_DISPATCH(check, stream, build_tree_from_parents, params);
}

void build_tree_from_parents_cpu(const BuildTreeFromParentsParams& p) { build_given_trees(p); }

}  // namespace specdec::tree
