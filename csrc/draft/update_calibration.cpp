// update_calibration: argument checks and the CPU implementation.
#include "draft/update_calibration.h"

#include <vector>

namespace specdec::draft {

void update_calibration(CallStream stream, const TensorView& table, const TensorView& counts, const TensorView& tokens,
                        const TensorView& parents, const TensorView& positions, const TensorView& num_nodes,
                        const TensorView& scores, const TensorView& emitted, const TensorView& num_valid) {
  Check check("update_calibration");
  Dim D{"num_depths"}, B{"batch"}, N{"num_nodes"}, S{"accept_width"};
  check.output("calibration.table", table, {D, 2}, kFloat32);
  check.range("num_depths", D, 1, kMaxCalibratedDepths);
  check.output("calibration.counts", counts, {D, kCalibrationBins, kCalibrationSums}, kInt64);
  check.tensor("tree.tokens", tokens, {B, N}, kInt32);
  check.tensor("tree.parents", parents, {B, N}, kInt32);
  check.tensor("tree.positions", positions, {B, N}, kInt32);
  check.tensor("tree.num_nodes", num_nodes, {B}, kInt32);
  check.tensor("scores", scores, {B, N}, kFloat32);
  check.tensor("accepted.tokens", emitted, {B, S}, kInt32);
  check.tensor("accepted.num_valid", num_valid, {B}, kInt32);
  if (B == 0 || N == 0) return;

  const UpdateCalibrationParams params{
      .table = table.data<float>(),
      .counts = counts.data<int64_t>(),
      .tokens = tokens.data<const int32_t>(),
      .parents = parents.data<const int32_t>(),
      .positions = positions.data<const int32_t>(),
      .num_nodes = num_nodes.data<const int32_t>(),
      .scores = scores.data<const float>(),
      .emitted = emitted.data<const int32_t>(),
      .num_valid = num_valid.data<const int32_t>(),
      .batch = B,
      .nodes = N,
      .width = S,
      .depths = D,
  };
  SD_DISPATCH(check, stream, update_calibration, params);
}

namespace {

// Update a depth's counts and refit its scaling, if any of its nodes was observed.
void update_depth(const UpdateCalibrationParams& p, int64_t depth, const int64_t* more) {
  constexpr int kSums = kCalibrationSums;
  int64_t* const counts = p.counts + depth * kCalibrationBins * kSums;
  BinCounts bins[kCalibrationBins];
  int64_t observed = 0, all = 0;
  for (int b = 0; b < kCalibrationBins; ++b) {
    bins[b] = BinCounts::of(counts + b * kSums);
    bins[b].add(BinCounts::of(more + b * kSums));
    observed += more[b * kSums];
    all = add_wrapped(all, bins[b].nodes);
  }
  if (observed == 0) return;
  for (int b = 0; b < kCalibrationBins; ++b) {
    bins[b].decay(all);
    bins[b].store(counts + b * kSums);
  }
  float* const platt = p.table + 2 * depth;
  Fit fit{platt[0], platt[1]};
  for (int step = 0; step < kNewtonSteps; ++step) {
    Derivatives total = fit.prior_derivatives();
    for (const BinCounts& bin : bins) total.add(fit.bin_derivatives(bin));
    fit.step(total);
  }
  platt[0] = static_cast<float>(fit.slope);
  platt[1] = static_cast<float>(fit.offset);
}

}  // namespace

void update_calibration_cpu(const UpdateCalibrationParams& p) {
  constexpr int64_t kSums = kCalibrationBins * kCalibrationSums;
  std::vector<int64_t> more(p.depths * kSums);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 1; i < p.nodes; ++i) {
      const ObservedNode observed = observe_node(p, b, i);
      if (observed.bin < 0) continue;
      int64_t* const sums = &more[observed.bin * kCalibrationSums];
      sums[0] += 1;
      sums[1] += observed.accepted;
      sums[2] += observed.logit;
    }
  for (int64_t depth = 0; depth < p.depths; ++depth) update_depth(p, depth, &more[depth * kSums]);
}

}  // namespace specdec::draft
