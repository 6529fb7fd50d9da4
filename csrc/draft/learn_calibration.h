// learn_calibration: what became of the nodes that were verified moves the table by which a draft's log-probabilities
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

struct LearnCalibrationParams {
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

SD_HD SeenNode seen_node(const LearnCalibrationParams& p, int64_t b, int64_t i) {
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

// Adds what a round has shown to the counts of a depth, [16, 3] each, and halves them where they are many.
SD_HD void add_counts(int64_t* counts, const int64_t* more) {
  int64_t nodes = 0;
  for (int i = 0; i < kCalibrationBins * kCalibrationSums; ++i) {
    counts[i] += more[i];
    if (i % kCalibrationSums == 0) nodes += counts[i];
  }
  for (; nodes > kMaxCalibrationNodes; nodes /= 2)
    for (int i = 0; i < kCalibrationBins * kCalibrationSums; ++i) counts[i] /= 2;
}

// The likeliest Platt scaling of a depth's counts, from the last one on.
SD_HD Platt fit_platt(Platt platt, const int64_t* counts) {
  constexpr int kSteps = 2;  // counts move little from round to round
  constexpr double kPrior = 2;
  double slope = platt.slope, offset = platt.offset;
  for (int step = 0; step < kSteps; ++step) {
    // The slope and the curvature of -log p(counts), which is convex.
    double by_slope = mul(kPrior, add(slope, -1.0)), by_offset = mul(kPrior, offset);
    double slope2 = kPrior, offset2 = kPrior, both = 0;
    for (int bin = 0; bin < kCalibrationBins; ++bin) {
      const int64_t* const sums = counts + bin * kCalibrationSums;
      if (sums[0] <= 0) continue;
      const auto nodes = static_cast<double>(sums[0]), taken = static_cast<double>(sums[1]);
      const double logit = mul(div(static_cast<double>(sums[2]), nodes), 0x1p-16);
      const double z = add(mul(slope, logit), offset);
      const auto least = static_cast<float>(z < 0 ? z : -z);
      const double odds = mul(static_cast<double>(exp2_weight(mul(least, kLog2e))), 0x1p-40);
      const double minor = div(odds, add(1.0, odds)), p = z < 0 ? minor : add(1.0, -minor);
      const double beyond = add(mul(nodes, p), -taken), weight = mul(nodes, mul(p, add(1.0, -p)));
      by_slope = add(by_slope, mul(beyond, logit));
      by_offset = add(by_offset, beyond);
      slope2 = add(slope2, mul(weight, mul(logit, logit)));
      both = add(both, mul(weight, logit));
      offset2 = add(offset2, weight);
    }
    const double determinant = add(mul(slope2, offset2), -mul(both, both));
    const double of_slope = div(add(mul(by_slope, offset2), -mul(by_offset, both)), determinant);
    const double before = slope;
    slope = clamp_to(add(slope, -clamp_to(of_slope, -0.5, 0.5)), 0.125, 8.0);
    const double of_offset = div(add(by_offset, -mul(both, add(before, -slope))), offset2);  // beside that slope
    offset = clamp_to(add(offset, -clamp_to(of_offset, -0.5, 0.5)), -8.0, 8.0);
  }
  return {static_cast<float>(slope), static_cast<float>(offset)};
}

// A depth of which something was seen has new counts and a new scaling.
SD_HD void learn_depth(const LearnCalibrationParams& p, int64_t depth, const int64_t* more) {
  int64_t seen = 0;
  for (int bin = 0; bin < kCalibrationBins; ++bin) seen += more[bin * kCalibrationSums];
  if (seen == 0) return;
  int64_t* const counts = p.counts + depth * kCalibrationBins * kCalibrationSums;
  add_counts(counts, more);
  const Platt platt = fit_platt({p.table[2 * depth], p.table[2 * depth + 1]}, counts);
  p.table[2 * depth] = platt.slope;
  p.table[2 * depth + 1] = platt.offset;
}

void learn_calibration(CallStream stream, const TensorView& table, const TensorView& counts, const TensorView& tokens,
                       const TensorView& parents, const TensorView& positions, const TensorView& num_nodes,
                       const TensorView& scores, const TensorView& emitted, const TensorView& num_valid);

void learn_calibration_cpu(const LearnCalibrationParams& p);
void learn_calibration_cuda(const LearnCalibrationParams& p, Stream stream);

}  // namespace specdec::draft
