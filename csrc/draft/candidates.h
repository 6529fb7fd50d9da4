// What expand_tree and build_tree agree on, on both devices: how candidates are numbered, scored and ordered.
//
// A candidate row lists the draft tree in the order it was grown: the k children of the root, then k * k children of
// the frontier for each later step. A candidate's parent therefore always has a lower number.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace specdec::draft {

constexpr int64_t kMaxSteps = 1024;

SD_HD int64_t num_candidates(int64_t k, int64_t num_steps) { return k + (num_steps - 1) * k * k; }

// The number of the first candidate of a step >= 2.
SD_HD int64_t first_candidate(int64_t k, int64_t step) { return num_candidates(k, step - 1); }

// Words of a draft mask: one bit for every node fed to the draft, which the last step's nodes are not.
SD_HD int64_t draft_mask_words(int64_t k, int64_t num_steps) {
  const int64_t words = (k * (num_steps - 1) + 63) / 64;
  return words > 1 ? words : 1;
}

// The cumulative score of a child: never above its parent's, which keeps every best-first prefix ancestor-closed.
SD_HD float child_score(float parent, float logprob) {
  if (!(logprob == logprob) || !(parent == parent)) return -INFINITY;  // NaN counts as -inf
  const float score = parent + logprob;
  return score < parent ? score : parent;
}

}  // namespace specdec::draft
