// What a draft says of a child, put right: Platt scaling of its log-probability, by depth (Platt 1999; Guo et al. 2017,
// arXiv 1706.04599, who fit the slope alone). logit p' = slope * logit p + offset, the same bits on both devices.
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

// Row min(depth, num_depths) - 1 of a table [num_depths, 2]; the identity where there is no table.
SD_HD Platt platt_of(const float* table, int64_t num_depths, int64_t depth) {
  if (!table) return {1, 0};
  const int64_t row = clamp_to(depth, 1, num_depths) - 1;
  return {table[2 * row], table[2 * row + 1]};
}

// log(p / (1 - p)) of log p <= 0, for p from e^-24 to 1 - 6e-6; one beyond counts as the nearest.
SD_HD float logit_of(float logprob) {
  const float x = clamp_to(logprob, -24.0f, -6e-6f);
  float rest = mul(-x, add(1.0f, mul(0.5f, x)));  // 1 - p of p near 1
  if (x < -0x1p-7f) rest = sub(1.0f, mul(static_cast<float>(exp2_weight(mul(x, kLog2e))), 0x1p-40f));
  return sub(x, mul(kLn2, log2_of(rest)));
}

// log p of a logit.
SD_HD float logprob_of(float logit) {
  const float least = mul(logit < 0 ? logit : -logit, kLog2e);
  const float odds = mul(static_cast<float>(exp2_weight(least)), 0x1p-40f);  // of the less likely side, to 1
  const float loss = mul(kLn2, odds < 0.4f ? log2_1p(odds) : log2_of(add(1.0f, odds)));
  return sub(logit < 0 ? logit : 0.0f, loss);
}

// What log p counts for. It rises with log p; what is no number, or no candidate, stays.
SD_HD float calibrated(const Platt& platt, float logprob) {
  if (platt.is_identity() || !(logprob > -INFINITY)) return logprob;
  return logprob_of(add(mul(platt.slope, logit_of(logprob)), platt.offset));
}

// The logit of the p that counts for `logprob`.
SD_HD float logit_before(const Platt& platt, float logprob) {
  return div(sub(logit_of(logprob), platt.offset), platt.slope);
}

}  // namespace specdec::draft
