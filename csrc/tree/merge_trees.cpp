// merge_trees: argument checks and the CPU implementation.
#include "tree/merge_trees.h"

#include <algorithm>
#include <limits>

#include "core/best_list.h"

namespace specdec::tree {
namespace {

ScoredTree check_tree(Check& check, Dim& B, Dim& nodes, const char* const (&names)[5], const TensorView& tokens,
                      const TensorView& parents, const TensorView& positions, const TensorView& num_nodes,
                      const TensorView& scores) {
  check.tensor(names[0], tokens, {B, nodes}, kInt32);
  check.range(nodes.name, nodes, 1, kMaxTreeNodes);
  check.tensor(names[1], parents, {B, nodes}, kInt32);
  check.tensor(names[2], positions, {B, nodes}, kInt32);
  check.tensor(names[3], num_nodes, {B}, kInt32);
  check.tensor(names[4], scores, {B, nodes}, kFloat32);
  return {tokens.data<const int32_t>(),    parents.data<const int32_t>(), positions.data<const int32_t>(),
          num_nodes.data<const int32_t>(), scores.data<const float>(),    nodes};
}

}  // namespace

void merge_trees(CallStream stream, const TensorView& a_tokens, const TensorView& a_parents,
                 const TensorView& a_positions, const TensorView& a_num_nodes, const TensorView& a_scores,
                 const TensorView& b_tokens, const TensorView& b_parents, const TensorView& b_positions,
                 const TensorView& b_num_nodes, const TensorView& b_scores, int64_t num_nodes,
                 const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
                 const TensorView& out_first_child, const TensorView& out_next_sibling, const TensorView& out_mask,
                 const TensorView& out_num_nodes, const TensorView& out_scores) {
  Check check("merge_trees");
  Dim B{"batch"}, Na{"a_nodes"}, Nb{"b_nodes"}, N{"num_nodes", num_nodes};
  const ScoredTree a = check_tree(check, B, Na, {"a.tokens", "a.parents", "a.positions", "a.num_nodes", "a_scores"},
                                  a_tokens, a_parents, a_positions, a_num_nodes, a_scores);
  const ScoredTree b = check_tree(check, B, Nb, {"b.tokens", "b.parents", "b.positions", "b.num_nodes", "b_scores"},
                                  b_tokens, b_parents, b_positions, b_num_nodes, b_scores);
  check.range("num_nodes", N, 1, kMaxTreeNodes);
  constexpr TreeNames kNames{"out[0].tokens",       "out[0].parents", "out[0].positions", "out[0].first_child",
                             "out[0].next_sibling", "out[0].mask",    "out[0].num_nodes"};
  const TreeOut out = check_tree_out(check, kNames, B, N, out_tokens, out_parents, out_positions, out_first_child,
                                     out_next_sibling, out_mask, out_num_nodes);
  check.output("out[1]", out_scores, {B, N}, kFloat32);
  if (B == 0) return;

  const MergeTreesParams params{.a = a, .b = b, .out = out, .out_scores = out_scores.data<float>(), .batch = B};
  SD_DISPATCH(check, stream, merge_trees, params);
}

void merge_trees_cpu(const MergeTreesParams& p) {
  constexpr int64_t kMaxCandidates = 2 * kMaxTreeNodes;
  const auto nodes = static_cast<int32_t>(p.out.nodes);
  for (int64_t row = 0; row < p.batch; ++row) {
    const RowPair pair = row_pair(p, row);
    const int32_t candidates = pair.candidates();
    uint64_t paths[kMaxCandidates];
    float scores[kMaxCandidates];
    int32_t representative[kMaxCandidates];  // index that represents each candidate
    for (int32_t c = 0; c < candidates; ++c) {
      const PathNode node = path_node(pair.row_of(c), pair.node_of(c));
      paths[c] = node.path;
      scores[c] = node.score;
      representative[c] = c;
      if (node.path == 0) continue;
      int32_t same = 0;
      while (paths[same] != node.path) ++same;  // at most c
      representative[c] = same;
      scores[same] = std::max(scores[same], node.score);
    }

    BestList<kMaxTreeNodes> best(nodes - 1);
    for (int32_t c = 0; c < candidates; ++c)
      if (representative[c] == c && scores[c] > -INFINITY) best.offer(scores[c], c);

    int32_t tokens[kMaxTreeNodes], parents[kMaxTreeNodes], node_of[kMaxCandidates];
    TreeRow tree{pair.head(), tokens, parents};
    tokens[0] = tree.root_token;
    parents[0] = -1;
    float* const out_scores = p.out_scores + row * p.out.nodes;
    std::fill_n(out_scores, nodes, -std::numeric_limits<float>::infinity());
    if (tree.count > 0) out_scores[0] = 0;
    for (int32_t i = 0; i < best.count(); ++i) {
      const int32_t c = best.ids()[i], node = tree.count++, parent = pair.parent_of(c);
      node_of[c] = node;
      tokens[node] = pair.row_of(c).tokens[pair.node_of(c)];
      parents[node] = parent < 0 ? 0 : node_of[representative[parent]];
      out_scores[node] = best.scores()[i];
    }
    write_row(p.out, row, tree);
  }
}

}  // namespace specdec::tree
