#include "draft/learn_calibration.h"

#include <vector>

namespace specdec::draft {

void learn_calibration(CallStream stream, const TensorView& table, const TensorView& counts, const TensorView& tokens,
                       const TensorView& parents, const TensorView& positions, const TensorView& num_nodes,
                       const TensorView& scores, const TensorView& emitted, const TensorView& num_valid) {
  Check check("learn_calibration");
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

  const LearnCalibrationParams params{
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
  SD_DISPATCH(check, stream, learn_calibration, params);
}

void learn_calibration_cpu(const LearnCalibrationParams& p) {
  constexpr int64_t kSums = kCalibrationBins * kCalibrationSums;
  std::vector<int64_t> more(p.depths * kSums);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 1; i < p.nodes; ++i) {
      const SeenNode seen = seen_node(p, b, i);
      if (seen.bin < 0) continue;
      int64_t* const sums = &more[seen.bin * kCalibrationSums];
      sums[0] += 1;
      sums[1] += seen.taken;
      sums[2] += seen.logit;
    }
  for (int64_t depth = 0; depth < p.depths; ++depth) learn_depth(p, depth, &more[depth * kSums]);
}

}  // namespace specdec::draft
