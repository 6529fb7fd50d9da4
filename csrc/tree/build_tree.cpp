// build_tree: argument checks and the CPU implementation.
#include "tree/build_tree.h"

#include <limits>

#include "core/best_list.h"

namespace specdec::tree {

void build_tree(CallStream stream, const TensorView& cand_tokens, const TensorView& cand_parents,
                const TensorView& cand_scores, const TensorView& root_tokens, const TensorView& seq_lens,
                int64_t num_nodes, const OptTensor& slots, const std::string& order, const OptTensor& status,
                const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
                const TensorView& out_first_child, const TensorView& out_next_sibling, const TensorView& out_mask,
                const TensorView& out_num_nodes, const OptTensor& out_scores) {
  Check check("build_tree");
  Dim B{"batch"}, C{"candidates"}, S{"num_slots"}, N{"num_nodes", num_nodes};
  check.tensor("candidates.tokens", cand_tokens, {B, C}, kInt32);
  check.range("candidates", C, 0, std::numeric_limits<int32_t>::max());
  check.tensor("candidates.parents", cand_parents, {B, C}, kInt32);
  check.tensor("candidates.scores", cand_scores, {B, C}, kFloat32);
  check.tensor("root_tokens", root_tokens, {S}, kInt32);
  check.tensor("seq_lens", seq_lens, {S}, kInt32);
  check.range("num_nodes", N, 1, kMaxTreeNodes);
  check.slots(slots, B, S);
  check.that(order == "score" || order == "given", "order", {"is '", order, "'"}, "'score' or 'given'");
  check.output("status", status, {S}, kInt32);
  const TreeOut out = check_tree_out(check, kOutTree, B, N, out_tokens, out_parents, out_positions, out_first_child,
                                     out_next_sibling, out_mask, out_num_nodes);
  check.output("out_scores", out_scores, {B, N}, kFloat32);
  if (B == 0) return;

  const BuildTreeParams params{
      .cand_tokens = cand_tokens.data<const int32_t>(),
      .cand_parents = cand_parents.data<const int32_t>(),
      .cand_scores = cand_scores.data<const float>(),
      .root_tokens = root_tokens.data<const int32_t>(),
      .seq_lens = seq_lens.data<const int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .given_order = order == "given",
      .status = data_or_null<int32_t>(status),
      .out = out,
      .out_scores = data_or_null<float>(out_scores),
      .batch = B,
      .num_slots = S,
      .candidates = C,
  };
  SD_DISPATCH(check, stream, build_tree, params);
}

// Return the parent node of node i: nodes 1.. are the candidates `chosen`, in order.
static int32_t parent_node(const CandidateRow& row, const int32_t* chosen, int32_t i) {
  if (i == 0) return -1;
  const int32_t parent = row.parents[chosen[i - 1]];
  for (int32_t node = i - 1; node > 0; --node)
    if (chosen[node - 1] == parent) return node;
  return 0;
}

void build_tree_cpu(const BuildTreeParams& p) {
  const auto nodes = static_cast<int32_t>(p.out.nodes);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_of(p.slots, b, p.num_slots);
    const int64_t candidates = slot >= 0 ? p.candidates : 0;
    const CandidateRow row = candidate_row(p, b);

    bool malformed = false;
    for (int64_t c = 0; c < candidates; ++c) malformed |= row.rank_score(c) > -INFINITY && !row.follows_parent(c);
    if (malformed) set_status(p.status, slot, kBadTree);

    BestList<kMaxTreeNodes> best(nodes - 1);
    for (int64_t c = 0; c < candidates; ++c) {
      const float score = row.rank_score(c);
      if (score > -INFINITY && (!malformed || row.reaches_root(c, nodes - 1)))
        best.offer(score, static_cast<int32_t>(c));
    }

    int32_t tokens[kMaxTreeNodes], parents[kMaxTreeNodes];
    TreeRow tree{{}, tokens, parents};
    if (slot >= 0) {
      tree.count = 1 + best.count();
      tree.root_token = p.root_tokens[slot];
      tree.seq_len = p.seq_lens[slot];
    }
    for (int32_t i = 0; i < tree.count; ++i) {
      tokens[i] = i == 0 ? tree.root_token : row.tokens[best.ids()[i - 1]];
      parents[i] = parent_node(row, best.ids(), i);
    }
    write_row(p.out, b, tree);
    for (int32_t i = 0; i < nodes && p.out_scores; ++i)
      p.out_scores[b * nodes + i] = i == 0 ? 0.0f : i < tree.count ? row.scores[best.ids()[i - 1]] : -INFINITY;
  }
}

}  // namespace specdec::tree
