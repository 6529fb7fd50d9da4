// Sampling parameters of a request, and the weights they give to a row of logits. Shared by CPU and GPU.
//
// A request's temperature, top-k, top-p and min-p enter verification here: sampler_of() reads them from SamplingArrays
// by slot and turns them into a Sampler. Sampler::scale = log2(e) / temperature.
//
// A token's weight is 2^((x - max) * scale) in units of 2^-40 (core/exact_math.h), so sums of weights are exact
// integers in any order. Every filter keeps the tokens above some logit: top-k and top-p keep those whose order key
// reaches a threshold, min-p those whose weight does. Ties with the last kept token are therefore kept, too.
#pragma once

#include "core/exact_math.h"
#include "core/philox.h"

namespace specdec::verify {

// Sampling parameters by slot. All null: every request is greedy.
struct SamplingArrays {
  const float* temperature;  // [num_slots]; <= 0 or NaN: greedy
  const int32_t* top_k;      // [num_slots] or null; <= 0: off
  const float* top_p;        // [num_slots] or null; >= 1 or NaN: off
  const float* min_p;        // [num_slots] or null; <= 0 or NaN: off
  const int64_t* seeds;      // [num_slots]
};

// Sampling parameters of one request.
struct Sampler {
  bool greedy = true;
  float scale = 0;          // log2(e) / temperature
  int64_t top_k = 0;        // 0: off
  float top_p = 1;          // 1: off
  uint64_t min_weight = 0;  // min-p's threshold; 0: off
  uint64_t seed = 0;

  SD_HD bool filters_by_key() const { return top_k > 0 || top_p < 1; }
  // Return a token's weight after min-p; the likeliest token weighs 2^40.
  SD_HD uint64_t after_min_p(uint64_t weight) const { return weight >= min_weight ? weight : 0; }
};

SD_HD Sampler sampler_of(const SamplingArrays& a, int64_t slot, int64_t vocab) {
  Sampler s;
  if (!a.temperature) return s;
  // All loads come before the first use, so that their latencies overlap on a GPU.
  const float temperature = a.temperature[slot], top_p = a.top_p ? a.top_p[slot] : 1,
              min_p = a.min_p ? a.min_p[slot] : 0;
  const int32_t top_k = a.top_k ? a.top_k[slot] : 0;
  const int64_t seed = a.seeds[slot];
  if (!(temperature > 0)) return s;
  s.greedy = false;
  constexpr float kLog2E = 1.44269504f, kLargest = 3.0e38f;  // infinity times a difference of 0 would be NaN
  s.scale = div(kLog2E, temperature);
  if (!(s.scale < kLargest)) s.scale = kLargest;
  if (top_k > 0 && top_k < vocab) s.top_k = top_k;
  if (top_p < 1) s.top_p = top_p;
  if (min_p > 0)
    s.min_weight = static_cast<uint64_t>(static_cast<double>(min_p < 1 ? min_p : 1.0f) *
                                         static_cast<double>(uint64_t{1} << kWeightBits));
  s.seed = static_cast<uint64_t>(seed);
  return s;
}

// A row's softmax before filters: logits relative to the row's maximum, times the scale.
struct RowScale {
  float max, scale;

  SD_HD float exponent(float x) const { return x == max ? 0.0f : mul(sub(x, max), scale); }  // +inf: only the maximum
  SD_HD uint64_t weight(float x) const { return exp2_weight(exponent(x)); }
};

// Return the weight, of `total`, that the best tokens must reach together for top-p; at least one token's.
SD_HD uint64_t top_p_weight(float top_p, uint64_t total) {
  const double wanted = static_cast<double>(top_p) * static_cast<double>(total);
  return wanted > 1 ? static_cast<uint64_t>(wanted) : 1;
}

// Return the random threshold for absolute position `position`. The drawn token is the first, in order of ids, whose
// cumulative weight exceeds it.
SD_HD uint64_t drawn_weight(uint64_t seed, uint32_t position, uint64_t total) {
  return mul_high(noise(seed, NoiseUse::kToken, position, 0).u64(), total);
}

// Return the largest key in [low, high) with reaches(key). It holds for low and, once false, stays false.
template <class Reaches>
SD_HD uint32_t last_key(uint32_t low, uint32_t high, Reaches&& reaches) {
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (reaches(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace specdec::verify
