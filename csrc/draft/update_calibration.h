// update_calibration: learn from verified nodes the table that calibrates a draft's log-probabilities (calibration.h).
//
// A node is observed if the emitted tokens lead to its parent and go on; it is then accepted or not. So the tree may
// have been merged with another one or truncated before verification. The draft's own probability of a node is
// recovered by inverting the table at its score relative to its parent's, so only scores need to be stored. Each depth
// has 16 bins of the logit. Each bin counts nodes, accepted nodes and the sum of logits as integers, halved at a limit
// (exponential forgetting), so sums do not depend on order. Slope and offset of a depth maximize the likelihood of the
// counts, with a prior at 1 and 0; a few Newton steps from the previous values find them.
#pragma once

#include "core/dispatch.h"
#include "draft/calibration.h"

namespace specdec::draft {

constexpr int kCalibrationBins = 16, kCalibrationSums = 3;  // nodes, accepted nodes, sum of logits in 2^-16
constexpr int64_t kMaxCalibrationNodes = 1 << 14;           // per depth

struct UpdateCalibrationParams {
  float* table;              // [depths, 2], changed in place
  int64_t* counts;           // [depths, 16, 3], changed in place
  const int32_t* tokens;     // [batch, nodes]
  const int32_t* parents;    // [batch, nodes]
  const int32_t* positions;  // [batch, nodes]
  const int32_t* num_nodes;  // [batch]
  const float* scores;       // [batch, nodes]
  const int32_t* emitted;    // [batch, width]
  const int32_t* num_valid;  // [batch]
  int64_t batch, nodes, width, depths;
};

struct ObservedNode {
  int64_t bin = -1;  // index over all depths; -1: not observed
  bool accepted = false;
  int64_t logit = 0;  // in 2^-16
};

SD_HD ObservedNode observe_node(const UpdateCalibrationParams& p, int64_t b, int64_t i) {
  ObservedNode observed;
  const int64_t row = b * p.nodes, valid = p.num_valid[b] < p.width ? p.num_valid[b] : p.width;
  if (i < 1 || i >= p.num_nodes[b]) return observed;
  const int64_t level = int64_t{p.positions[row + i]} - p.positions[row], parent = p.parents[row + i];
  if (level < 1 || level > valid) return observed;
  const int32_t* const emitted = p.emitted + b * p.width;
  int64_t at = parent;
  for (int64_t above = level - 1; above > 0; --above) {
    if (at < 1 || at >= i || p.tokens[row + at] != emitted[above - 1]) return observed;
    at = p.parents[row + at];
  }
  if (at != 0) return observed;
  const float score = p.scores[row + i], above = parent > 0 ? p.scores[row + parent] : 0;
  if (!(score > -INFINITY) || !(above > -INFINITY) || !(score <= above)) return observed;

  const int64_t depth = clamp_to(level, 1, p.depths);
  const float before = uncalibrated_logit(platt_of(p.table, p.depths, depth), sub(score, above));
  if (!(before == before)) return observed;
  const float logit = clamp_to(before, -24.0f, 24.0f);
  const auto bin = static_cast<int64_t>(floorf(clamp_to(add(logit, 8.0f), 0.0f, 15.0f)));
  observed.bin = (depth - 1) * kCalibrationBins + bin;
  observed.accepted = emitted[level - 1] == p.tokens[row + i];
  observed.logit = static_cast<int64_t>(mul(logit, 0x1p16f));
  return observed;
}

// Counts of one bin.
struct BinCounts {
  int64_t nodes, accepted, logits;

  SD_HD static BinCounts of(const int64_t* sums) { return {sums[0], sums[1], sums[2]}; }
  SD_HD void store(int64_t* sums) const { sums[0] = nodes, sums[1] = accepted, sums[2] = logits; }
  SD_HD void add(const BinCounts& more) {
    nodes = add_wrapped(nodes, more.nodes);
    accepted = add_wrapped(accepted, more.accepted);
    logits = add_wrapped(logits, more.logits);
  }
  // Halve until the depth, which has `all` nodes, has at most kMaxCalibrationNodes.
  SD_HD void decay(int64_t all) {
    for (; all > kMaxCalibrationNodes; all /= 2) nodes /= 2, accepted /= 2, logits /= 2;
  }
};

// Gradient and Hessian of -log p(counts), which is convex: sums over bins and the prior.
struct Derivatives {
  double d_slope = 0, d_offset = 0, d2_slope = 0, d2_offset = 0, d2_mixed = 0;

  SD_HD void add(const Derivatives& other) {
    d_slope = specdec::add(d_slope, other.d_slope);
    d_offset = specdec::add(d_offset, other.d_offset);
    d2_slope = specdec::add(d2_slope, other.d2_slope);
    d2_offset = specdec::add(d2_offset, other.d2_offset);
    d2_mixed = specdec::add(d2_mixed, other.d2_mixed);
  }
};

constexpr int kNewtonSteps = 2;  // counts change little from round to round

// A depth's scaling during the Newton steps.
struct Fit {
  double slope, offset;

  SD_HD Derivatives prior_derivatives() const {
    constexpr double kPrior = 2;
    return {mul(kPrior, add(slope, -1.0)), mul(kPrior, offset), kPrior, kPrior, 0};
  }
  SD_HD Derivatives bin_derivatives(const BinCounts& bin) const {
    if (bin.nodes <= 0) return {};
    const auto nodes = static_cast<double>(bin.nodes), accepted = static_cast<double>(bin.accepted);
    const double logit = mul(div(static_cast<double>(bin.logits), nodes), 0x1p-16);
    const double z = add(mul(slope, logit), offset);
    const auto least = static_cast<float>(z < 0 ? z : -z);
    const double odds = mul(static_cast<double>(exp2_weight(mul(least, kLog2e))), 0x1p-40);
    const double minor = div(odds, add(1.0, odds)), p = z < 0 ? minor : add(1.0, -minor);
    const double excess = add(mul(nodes, p), -accepted), weight = mul(nodes, mul(p, add(1.0, -p)));
    return {mul(excess, logit), excess, mul(weight, mul(logit, logit)), weight, mul(weight, logit)};
  }
  SD_HD void step(const Derivatives& d) {
    const double determinant = add(mul(d.d2_slope, d.d2_offset), -mul(d.d2_mixed, d.d2_mixed));
    const double slope_step = div(add(mul(d.d_slope, d.d2_offset), -mul(d.d_offset, d.d2_mixed)), determinant);
    const double before = slope;
    slope = clamp_to(add(slope, -clamp_to(slope_step, -0.5, 0.5)), 0.125, 8.0);
    const double offset_step =
        div(add(d.d_offset, -mul(d.d2_mixed, add(before, -slope))), d.d2_offset);  // at the new slope
    offset = clamp_to(add(offset, -clamp_to(offset_step, -0.5, 0.5)), -8.0, 8.0);
  }
};

void update_calibration(CallStream stream, const TensorView& table, const TensorView& counts, const TensorView& tokens,
                        const TensorView& parents, const TensorView& positions, const TensorView& num_nodes,
                        const TensorView& scores, const TensorView& emitted, const TensorView& num_valid);

void update_calibration_cpu(const UpdateCalibrationParams& p);
void update_calibration_cuda(const UpdateCalibrationParams& p, Stream stream);

}  // namespace specdec::draft
