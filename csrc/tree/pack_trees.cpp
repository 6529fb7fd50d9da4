// pack_trees: argument checks and the CPU implementation.
#include "tree/pack_trees.h"

namespace specdec::tree {

void pack_trees(CallStream stream, const TensorView& tokens, const TensorView& parents, const TensorView& positions,
                const TensorView& first_child, const TensorView& next_sibling, const TensorView& mask,
                const TensorView& num_nodes, const TensorView& scores, const TensorView& kept,
                const TensorView& cu_seqlens, int64_t num_rows, const TensorView& out_tokens,
                const TensorView& out_positions, const TensorView& out_mask, const TensorView& out_scores) {
  Check check("pack_trees");
  Dim B{"batch"}, N{"num_nodes"}, M{"num_rows", num_rows};
  constexpr TreeNames kNames{"tree.tokens",       "tree.parents", "tree.positions", "tree.first_child",
                             "tree.next_sibling", "tree.mask",    "tree.num_nodes"};
  check.output(kNames.tokens, tokens, {B, N}, kInt32);
  check.range("num_nodes", N, 1, kMaxTreeNodes);
  const TreeOut tree =
      check_tree_out(check, kNames, B, N, tokens, parents, positions, first_child, next_sibling, mask, num_nodes);
  check.tensor("scores", scores, {B, N}, kFloat32);
  check.tensor("allocation.num_nodes", kept, {B}, kInt32);
  Dim W{"mask_words", tree.words};
  check.packed("allocation.cu_seqlens", cu_seqlens, B);
  check.range("num_rows", num_rows, 0, INT32_MAX);
  check.output("out.tokens", out_tokens, {M}, kInt32);
  check.output("out.positions", out_positions, {M}, kInt32);
  check.output("out.mask", out_mask, {M, W}, kInt64);
  check.output("out.scores", out_scores, {M}, kFloat32);
  if (B == 0 && num_rows == 0) return;

  const PackTreesParams params{
      .tree = tree,
      .scores = scores.data<const float>(),
      .num_nodes = kept.data<const int32_t>(),
      .cu_seqlens = cu_seqlens.data<const int32_t>(),
      .out_tokens = out_tokens.data<int32_t>(),
      .out_positions = out_positions.data<int32_t>(),
      .out_mask = out_mask.data<int64_t>(),
      .out_scores = out_scores.data<float>(),
      .batch = B,
      .num_rows = num_rows,
  };
  SD_DISPATCH(check, stream, pack_trees, params);
}

void pack_trees_cpu(const PackTreesParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int32_t kept = num_kept(p, b), root = p.tree.tokens[b * p.tree.nodes];
    const int32_t position = p.tree.positions[b * p.tree.nodes];
    for (int32_t i = 0; i < p.tree.nodes; ++i) cut_node(p, b, i, kept, root, position);
    p.tree.num_nodes[b] = kept;
  }
  for (int64_t row = 0; row < p.num_rows; ++row) pack_row(p, row);
}

}  // namespace specdec::tree
