// Calibration of a draft's probabilities by depth: Platt scaling of the child's log-probability (Platt 1999; Guo et al.
// 2017, arXiv 1706.04599, who fit only the slope): logit p' = slope * logit p + offset. Bitwise equal on CPU and GPU.
#pragma once

#include <cmath>

#include "core/exact_math.h"
#include "core/host_device.h"

namespace specdec::draft {

constexpr int64_t kMaxCalibratedDepths = 64;

struct Platt {
  float slope, offset;

  SD_HD bool is_identity() const { return slope == 1 && offset == 0; }
};

// Return row min(depth, num_depths) - 1 of a table [num_depths, 2]; the identity without a table.
SD_HD Platt platt_of(const float* table, int64_t num_depths, int64_t depth) {
  if (!table) return {1, 0};
  const int64_t row = clamp_to(depth, 1, num_depths) - 1;
  return {table[2 * row], table[2 * row + 1]};
}

// Return log(p / (1 - p)) of log p <= 0. p is clamped to e^-24 .. 1 - 6e-6.
SD_HD float logit_of(float logprob) {
  const float x = clamp_to(logprob, -24.0f, -6e-6f);
  float rest = mul(-x, add(1.0f, mul(0.5f, x)));  // 1 - p for p near 1
  if (x < -0x1p-7f) rest = sub(1.0f, mul(static_cast<float>(exp2_weight(mul(x, kLog2e))), 0x1p-40f));
  return sub(x, mul(kLn2, log2_of(rest)));
}

// Return log p of a logit.
SD_HD float logprob_of(float logit) {
  const float least = mul(logit < 0 ? logit : -logit, kLog2e);
  const float odds = mul(static_cast<float>(exp2_weight(least)), 0x1p-40f);  // odds of the less likely side
  const float loss = mul(kLn2, odds < 0.4f ? log2_1p(odds) : log2_of(add(1.0f, odds)));
  return sub(logit < 0 ? logit : 0.0f, loss);
}

// Return the calibrated log p. It increases with log p; NaN and -inf (no candidate) stay.
SD_HD float calibrated(const Platt& platt, float logprob) {
  if (platt.is_identity() || !(logprob > -INFINITY)) return logprob;
  return logprob_of(add(mul(platt.slope, logit_of(logprob)), platt.offset));
}

// Return the uncalibrated logit of a calibrated log-probability.
SD_HD float uncalibrated_logit(const Platt& platt, float logprob) {
  return div(sub(logit_of(logprob), platt.offset), platt.slope);
}

}  // namespace specdec::draft
