// allocate_nodes: argument checks and the CPU implementation.
#include "tree/allocate_nodes.h"

#include <algorithm>
#include <vector>

namespace specdec::tree {

void allocate_nodes(CallStream stream, const TensorView& scores, int64_t budget, const OptTensor& slots,
                    const OptTensor& max_nodes, const OptTensor& finish_reasons, const OptTensor& status,
                    const OptTensor& budget_levels, const OptTensor& level_limits, const TensorView& out_num_nodes,
                    const TensorView& out_cu_seqlens, const TensorView& out_expected, const TensorView& out_cuts) {
  Check check("allocate_nodes");
  Dim B{"batch"}, N{"num_nodes"}, S{"num_slots"}, R{"num_levels", 0};
  check.tensor("scores", scores, {B, N}, kFloat32);
  check.range("num_nodes", N, 1, kMaxTreeNodes);
  check.range("batch * num_nodes", B * N, 0, kMaxSharedRows);
  check.range("budget", budget, B, INT32_MAX);
  check.tensor("max_nodes", max_nodes, {S}, kInt32);
  check.tensor("finish_reasons", finish_reasons, {S}, kInt32);
  check.tensor("status", status, {S}, kInt32);
  if (!max_nodes && !finish_reasons && !status) S.value = INT32_MAX;  // any slot is valid
  check.slots(slots, B, S);
  if (budget_levels) R.value = -1;
  check.tensor("budget_levels", budget_levels, {R}, kInt32);
  check.that(budget_levels || !level_limits, "level_limits", "is given", "None, since budget_levels is None");
  check.tensor("level_limits", level_limits, {R}, kInt32);
  Dim ends{"batch + 1", B + 1};
  check.output("out.num_nodes", out_num_nodes, {B}, kInt32);
  check.output("out.cu_seqlens", out_cu_seqlens, {ends}, kInt32);
  check.output("out.expected", out_expected, {R}, kFloat32);
  check.output("out.cuts", out_cuts, {R}, kFloat32);

  const AllocateNodesParams params{
      .scores = scores.data<const float>(),
      .slots = data_or_null<const int32_t>(slots),
      .max_nodes = data_or_null<const int32_t>(max_nodes),
      .finish_reasons = data_or_null<const int32_t>(finish_reasons),
      .status = data_or_null<const int32_t>(status),
      .budget_levels = data_or_null<const int32_t>(budget_levels),
      .level_limits = data_or_null<const int32_t>(level_limits),
      .out_num_nodes = out_num_nodes.data<int32_t>(),
      .out_cu_seqlens = out_cu_seqlens.data<int32_t>(),
      .out_expected = out_expected.data<float>(),
      .out_cuts = out_cuts.data<float>(),
      .batch = B,
      .nodes = N,
      .num_slots = S,
      .num_levels = R,
      .budget = budget,
  };
  SD_DISPATCH(check, stream, allocate_nodes, params);
}

void allocate_nodes_cpu(const AllocateNodesParams& p) {
  std::vector<int32_t> lengths(p.batch);
  const auto limit_lists = [&](int64_t level) {
    for (int64_t b = 0; b < p.batch; ++b) lengths[b] = list_length(p, b, node_limit(p, level));
  };
  const auto total = [&](uint32_t key) {
    int64_t count = 0;
    for (int64_t b = 0; b < p.batch; ++b) count += count_at_least(p, b, lengths[b], key);
    return count;
  };
  limit_lists(-1);
  const int64_t roots = std::ranges::count_if(lengths, [](int32_t length) { return length > 0; });

  Cut cut = find_cut(non_root_rows(p.budget, roots), total);
  int64_t taken = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const SelectedCounts found = count_selected(p, b, lengths[b], cut);
    const int64_t ties = std::min<int64_t>(cut.ties, found.equal);
    cut.ties -= ties;
    p.out_num_nodes[b] = lengths[b] > 0 ? static_cast<int32_t>(1 + found.above + ties) : 0;
    p.out_cu_seqlens[b] = static_cast<int32_t>(taken);
    taken += p.out_num_nodes[b];
  }
  p.out_cu_seqlens[p.batch] = static_cast<int32_t>(taken);

  for (int64_t r = 0; r < p.num_levels; ++r) {
    limit_lists(r);
    const int64_t room = non_root_rows(p.budget_levels[r], roots);
    const Cut at = find_cut(room, total);
    uint64_t weight = static_cast<uint64_t>(at.ties) * weight_of(key_float(at.key));
    for (int64_t b = 0; b < p.batch; ++b) weight += weight_above(p, b, lengths[b], at);
    p.out_expected[r] = sum_of(weight);
    p.out_cuts[r] = cut_score(room, at);
  }
}

}  // namespace specdec::tree
