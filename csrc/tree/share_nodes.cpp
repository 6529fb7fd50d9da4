#include "tree/share_nodes.h"

#include <algorithm>

namespace specdec::tree {

void share_nodes(CallStream stream, const TensorView& scores, int64_t budget, const OptTensor& limits,
                 const OptTensor& slots, const OptTensor& rungs, const TensorView& out_num_nodes,
                 const TensorView& out_cu_seqlens, const TensorView& out_expected, const TensorView& out_cuts) {
  Check check("share_nodes");
  Dim B{"batch"}, N{"num_nodes"}, R{"num_rungs", 0};
  check.tensor("scores", scores, {B, N}, kFloat32);
  check.range("num_nodes", N, 1, kMaxTreeNodes);
  check.range("batch * num_nodes", B * N, 0, kMaxSharedRows);
  check.range("budget", budget, B, INT32_MAX);
  check.tensor("limits", limits, {B}, kInt32);
  check.tensor("slots", slots, {B}, kInt32);
  if (rungs) R.value = -1;
  check.tensor("rungs", rungs, {R}, kInt32);
  Dim ends{"batch + 1", B + 1};
  check.output("out.num_nodes", out_num_nodes, {B}, kInt32);
  check.output("out.cu_seqlens", out_cu_seqlens, {ends}, kInt32);
  check.output("out.expected", out_expected, {R}, kFloat32);
  check.output("out.cuts", out_cuts, {R}, kFloat32);

  const ShareNodesParams params{
      .scores = scores.data<const float>(),
      .limits = data_or_null<const int32_t>(limits),
      .slots = data_or_null<const int32_t>(slots),
      .rungs = data_or_null<const int32_t>(rungs),
      .out_num_nodes = out_num_nodes.data<int32_t>(),
      .out_cu_seqlens = out_cu_seqlens.data<int32_t>(),
      .out_expected = out_expected.data<float>(),
      .out_cuts = out_cuts.data<float>(),
      .batch = B,
      .nodes = N,
      .num_rungs = R,
      .budget = budget,
  };
  SD_DISPATCH(check, stream, share_nodes, params);
}

void share_nodes_cpu(const ShareNodesParams& p) {
  int64_t roots = 0;
  for (int64_t b = 0; b < p.batch; ++b) roots += list_length(p, b) > 0;
  const auto total = [&](uint32_t key) {
    int64_t count = 0;
    for (int64_t b = 0; b < p.batch; ++b) count += num_reaching(p, b, key);
    return count;
  };

  Cut cut = find_cut(room_of(p.budget, roots), total);
  int64_t taken = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Reaching found = reaching(p, b, cut);
    const int64_t ties = std::min<int64_t>(cut.ties, found.equal);
    cut.ties -= ties;
    p.out_num_nodes[b] = list_length(p, b) > 0 ? static_cast<int32_t>(1 + found.above + ties) : 0;
    p.out_cu_seqlens[b] = static_cast<int32_t>(taken);
    taken += p.out_num_nodes[b];
  }
  p.out_cu_seqlens[p.batch] = static_cast<int32_t>(taken);

  for (int64_t r = 0; r < p.num_rungs; ++r) {
    const int64_t room = room_of(p.rungs[r], roots);
    const Cut at = find_cut(room, total);
    uint64_t weight = static_cast<uint64_t>(at.ties) * weight_of(key_float(at.key));
    for (int64_t b = 0; b < p.batch; ++b) weight += weight_above(p, b, at);
    p.out_expected[r] = expected_of(weight);
    p.out_cuts[r] = cut_score(room, at);
  }
}

}  // namespace specdec::tree
