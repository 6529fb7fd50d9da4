// Candidate order and scores shared by expand_tree and build_tree, on CPU and GPU.
//
// A candidate row lists the draft tree in the order of growth: the root's k children, then k * k children of the
// frontier per later step. A candidate's parent therefore always has a lower index.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace specdec::draft {

constexpr int64_t kMaxSteps = 1024;

SD_HD int64_t num_candidates(int64_t k, int64_t num_steps) { return k + (num_steps - 1) * k * k; }

// Return the index of the first candidate of a step >= 2.
SD_HD int64_t first_candidate(int64_t k, int64_t step) { return num_candidates(k, step - 1); }

// Return the words of a draft mask: one bit per node fed to the draft (the last step's nodes are not).
SD_HD int64_t draft_mask_words(int64_t k, int64_t num_steps) {
  const int64_t words = (k * (num_steps - 1) + 63) / 64;
  return words > 1 ? words : 1;
}

// Return a child's cumulative score. It never exceeds its parent's, so every best-first prefix is closed under
// ancestors.
SD_HD float child_score(float parent, float logprob) {
  if (!(logprob == logprob) || !(parent == parent)) return -INFINITY;  // NaN counts as -inf
  const float score = parent + logprob;
  return score < parent ? score : parent;
}

}  // namespace specdec::draft
