#include "tree/build_tree_from_parents.h"

namespace specdec {

void build_tree_from_parents(CallStream stream, const TensorView& tokens, const TensorView& parents,
                             const TensorView& seq_lens, const OptTensor& num_nodes, const OptTensor& slots,
                             const OptTensor& status, const TensorView& out_tokens, const TensorView& out_parents,
                             const TensorView& out_positions, const TensorView& out_first_child,
                             const TensorView& out_next_sibling, const TensorView& out_mask,
                             const TensorView& out_num_nodes) {
  Check check("build_tree_from_parents");
  Dim B{"batch"}, N{"nodes"}, S{"num_slots"};
  check.tensor("tokens", tokens, {B, N}, kInt32);
  check.range("nodes", N, 1, kMaxTreeNodes);
  check.tensor("parents", parents, {B, N}, kInt32);
  check.tensor("seq_lens", seq_lens, {S}, kInt32);
  check.tensor("num_nodes", num_nodes, {B}, kInt32);
  check.slots(slots, B, S);
  check.output("status", status, {S}, kInt32);
  const TreeOut out = check_tree_out(check, B, N, out_tokens, out_parents, out_positions, out_first_child,
                                     out_next_sibling, out_mask, out_num_nodes);
  if (B == 0) return;

  const BuildTreeFromParentsParams params{
      .tokens = tokens.data<const int32_t>(),
      .parents = parents.data<const int32_t>(),
      .seq_lens = seq_lens.data<const int32_t>(),
      .num_nodes = data_or_null<const int32_t>(num_nodes),
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .out = out,
      .batch = B,
      .num_slots = S,
  };
  SD_DISPATCH(check, stream, build_tree_from_parents, params);
}

void build_tree_from_parents_cpu(const BuildTreeFromParentsParams& p) {
  const auto nodes = static_cast<int32_t>(p.out.nodes);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_of(p.slots, b, p.num_slots), at = b * nodes;
    int32_t parents[kMaxTreeNodes] = {-1};
    int32_t count = slot < 0 ? 0 : p.num_nodes ? p.num_nodes[b] : nodes;
    if (slot >= 0) {
      bool bad = count < 1 || count > nodes;
      for (int32_t i = 0; !bad && i < count; ++i) {
        parents[i] = p.parents[at + i];
        bad = !is_parent(parents[i], i);
      }
      if (bad) {
        set_status(p.status, slot, kBadTree);
        parents[0] = -1;
        count = 1;
      }
    }
    const TreeRow tree{parents, count, slot >= 0 ? p.tokens[at] : 0, slot >= 0 ? p.seq_lens[slot] : 0};
    for (int32_t i = 0; i < nodes; ++i) write_node(p.out, b, i, tree, p.tokens[at + i]);
  }
}

}  // namespace specdec
