// update_calibration: what became of the nodes that were verified moves the table by which a draft's log-probabilities
// are put right.
//
// A node counts if what was emitted led to its parent and went on; then it was taken or it was not. So the tree may
// be one that was merged with another before it was verified, or whose last nodes were left out. What the draft had
// said of a node is found by inverting the table at its score beside its parent's, so that nothing but the scores
// has to be kept. Each depth has 16 bins of the logit, of which nodes, those taken and the sum of logits are counted
// in integers, and halved when they have become many: a memory that fades, whose sums do not depend on their order.
// The slope and the offset of a depth are those that make what was counted likeliest, with a prior that holds them
// at 1 and 0; a few steps of Newton from the last ones on find them.
#pragma once

#include "core/dispatch.h"
#include "draft/calibration.h"

namespace specdec::draft {

constexpr int kCalibrationBins = 16, kCalibrationSums = 3;  // of nodes, of those taken, of logits in 2^-16
constexpr int64_t kMaxCalibrationNodes = 1 << 14;           // of a depth

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

struct SeenNode {
  int64_t bin = -1;  // among those of all depths; -1: it does not count
  bool taken = false;
  int64_t logit = 0;  // in 2^-16
};

SD_HD SeenNode seen_node(const UpdateCalibrationParams& p, int64_t b, int64_t i) {
  SeenNode seen;
  const int64_t row = b * p.nodes, valid = p.num_valid[b] < p.width ? p.num_valid[b] : p.width;
  if (i < 1 || i >= p.num_nodes[b]) return seen;
  const int64_t level = int64_t{p.positions[row + i]} - p.positions[row], parent = p.parents[row + i];
  if (level < 1 || level > valid) return seen;
  const int32_t* const emitted = p.emitted + b * p.width;
  int64_t at = parent;
  for (int64_t above = level - 1; above > 0; --above) {
    if (at < 1 || at >= i || p.tokens[row + at] != emitted[above - 1]) return seen;
    at = p.parents[row + at];
  }
  if (at != 0) return seen;
  const float score = p.scores[row + i], above = parent > 0 ? p.scores[row + parent] : 0;
  if (!(score > -INFINITY) || !(above > -INFINITY) || !(score <= above)) return seen;

  const int64_t depth = clamp_to(level, 1, p.depths);
  const float before = logit_before(platt_of(p.table, p.depths, depth), sub(score, above));
  if (!(before == before)) return seen;
  const float logit = clamp_to(before, -24.0f, 24.0f);
  const auto bin = static_cast<int64_t>(floorf(clamp_to(add(logit, 8.0f), 0.0f, 15.0f)));
  seen.bin = (depth - 1) * kCalibrationBins + bin;
  seen.taken = emitted[level - 1] == p.tokens[row + i];
  seen.logit = static_cast<int64_t>(mul(logit, 0x1p16f));
  return seen;
}

// What a bin of a depth has counted.
struct BinCounts {
  int64_t nodes, taken, logits;

  SD_HD static BinCounts of(const int64_t* sums) { return {sums[0], sums[1], sums[2]}; }
  SD_HD void store(int64_t* sums) const { sums[0] = nodes, sums[1] = taken, sums[2] = logits; }
  SD_HD void add(const BinCounts& more) { nodes += more.nodes, taken += more.taken, logits += more.logits; }
  // As often as it takes to have no more than kMaxCalibrationNodes of `all` nodes of the depth.
  SD_HD void fade(int64_t all) {
    for (; all > kMaxCalibrationNodes; all /= 2) nodes /= 2, taken /= 2, logits /= 2;
  }
};

// The slope and the curvature of -log p(counts), which is convex, at a scaling: sums over bins and the prior.
struct Descent {
  double by_slope = 0, by_offset = 0, slope2 = 0, offset2 = 0, both = 0;

  SD_HD void add(const Descent& other) {
    by_slope = specdec::add(by_slope, other.by_slope);
    by_offset = specdec::add(by_offset, other.by_offset);
    slope2 = specdec::add(slope2, other.slope2);
    offset2 = specdec::add(offset2, other.offset2);
    both = specdec::add(both, other.both);
  }
};

constexpr int kDescents = 2;  // steps of Newton's method; counts move little from round to round

// A depth's scaling on its way to the likeliest.
struct Fit {
  double slope, offset;

  SD_HD Descent of_prior() const {
    constexpr double kPrior = 2;
    return {mul(kPrior, add(slope, -1.0)), mul(kPrior, offset), kPrior, kPrior, 0};
  }
  SD_HD Descent of_bin(const BinCounts& bin) const {
    if (bin.nodes <= 0) return {};
    const auto nodes = static_cast<double>(bin.nodes), taken = static_cast<double>(bin.taken);
    const double logit = mul(div(static_cast<double>(bin.logits), nodes), 0x1p-16);
    const double z = add(mul(slope, logit), offset);
    const auto least = static_cast<float>(z < 0 ? z : -z);
    const double odds = mul(static_cast<double>(exp2_weight(mul(least, kLog2e))), 0x1p-40);
    const double minor = div(odds, add(1.0, odds)), p = z < 0 ? minor : add(1.0, -minor);
    const double beyond = add(mul(nodes, p), -taken), weight = mul(nodes, mul(p, add(1.0, -p)));
    return {mul(beyond, logit), beyond, mul(weight, mul(logit, logit)), weight, mul(weight, logit)};
  }
  SD_HD void step(const Descent& d) {
    const double determinant = add(mul(d.slope2, d.offset2), -mul(d.both, d.both));
    const double of_slope = div(add(mul(d.by_slope, d.offset2), -mul(d.by_offset, d.both)), determinant);
    const double before = slope;
    slope = clamp_to(add(slope, -clamp_to(of_slope, -0.5, 0.5)), 0.125, 8.0);
    const double of_offset = div(add(d.by_offset, -mul(d.both, add(before, -slope))), d.offset2);  // beside that slope
    offset = clamp_to(add(offset, -clamp_to(of_offset, -0.5, 0.5)), -8.0, 8.0);
  }
};

void update_calibration(CallStream stream, const TensorView& table, const TensorView& counts, const TensorView& tokens,
                        const TensorView& parents, const TensorView& positions, const TensorView& num_nodes,
                        const TensorView& scores, const TensorView& emitted, const TensorView& num_valid);

void update_calibration_cpu(const UpdateCalibrationParams& p);
void update_calibration_cuda(const UpdateCalibrationParams& p, Stream stream);

}  // namespace specdec::draft
