// build_tree_from_mask: argument checks and the CPU implementation.
#include "tree/build_tree_from_mask.h"

namespace specdec::tree {

void build_tree_from_mask(CallStream stream, const TensorView& tokens, const TensorView& mask,
                          const TensorView& seq_lens, const OptTensor& num_nodes, const OptTensor& slots,
                          const OptTensor& status, const TensorView& out_tokens, const TensorView& out_parents,
                          const TensorView& out_positions, const TensorView& out_first_child,
                          const TensorView& out_next_sibling, const TensorView& out_mask,
                          const TensorView& out_num_nodes) {
  Check check("build_tree_from_mask");
  Dim B{"batch"}, N{"nodes"};
  check.tensor("tokens", tokens, {B, N}, kInt32);
  check.range("nodes", N, 1, kMaxTreeNodes);
  Dim W{"mask_words", (N + 63) / 64};
  check.tensor("mask", mask, {B, N, W}, kInt64);
  const GivenTree given =
      check_given_tree(check, B, N, tokens, seq_lens, num_nodes, slots, status, out_tokens, out_parents, out_positions,
                       out_first_child, out_next_sibling, out_mask, out_num_nodes);
  if (B == 0) return;

  const BuildTreeFromMaskParams params{given, mask.data<const int64_t>()};
  SD_DISPATCH(check, stream, build_tree_from_mask, params);
}

void build_tree_from_mask_cpu(const BuildTreeFromMaskParams& p) { build_given_trees(p); }

}  // namespace specdec::tree
