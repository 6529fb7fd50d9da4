// Gumbel top-k (Kool et al., "Stochastic Beams and Where to Find Them", 2019), bitwise equal on CPU and GPU: the k
// entries with the largest log2(p) + noise, in descending order, are k draws from p without replacement. An entry's
// noise is -log2(E) with E exponentially distributed.
//
// E is computed from a 32-bit word as -log2(1 - v), v = (word + 1/2) / 2^32. Large scores come from small v, which is
// exact below 2^-9 and has 24 bits above; near v = 1, 1 - v is exact. So E covers 2^-32.5 to 33 with both ends
// resolved: a draw omits only events of probability below 2^-32. Scores near a row's best are a few units large; equal
// float32 scores go to the lower id, which affects 2^-20 of a draw.
#pragma once

#include "core/exact_math.h"
#include "core/philox.h"

namespace specdec::draft {

constexpr uint32_t kNoiseIds = 4;  // ids per block of noise: id uses words[id % 4] of block id / 4

// Return (word + 1/2) / 2^32.
SD_HD float unit_interval(uint32_t word) { return mul(add(static_cast<float>(word), 0.5f), 0x1p-32f); }

SD_HD float exponential(uint32_t word) {
  constexpr uint32_t kBelowSqrtHalf = 0x4afb0ccd;  // 1 - v is above sqrt(1/2) for smaller words
  return word < kBelowSqrtHalf ? -log2_1p(-unit_interval(word)) : -log2_of(unit_interval(~word));
}

// Return log2(e) / temperature, which turns logits into powers of 2; 0 if the temperature means greedy (<= 0 or NaN).
SD_HD float scale_of_temperature(float temperature) {
  if (!(temperature > 0)) return 0;
  constexpr float kLargest = 3.402823466e38f, kLeast = 1e-30f;
  const float scale = div(kLog2e, temperature);
  return scale > kLargest ? kLargest : scale < kLeast ? kLeast : scale;
}

// Return log2 of a probability up to a constant of the row, whose largest logit is `max`; -inf for -inf and NaN.
SD_HD float log2_weight(float x, float max, float scale) {
  return x > -INFINITY ? mul(below_max(x, max), scale) : -INFINITY;
}

SD_HD float perturbed(float log2_weight, uint32_t word) { return sub(log2_weight, log2_of(exponential(word))); }

}  // namespace specdec::draft
