// What expand_tree and build_tree agree on, on both devices: how candidates are numbered, scored and ordered.
//
// A candidate row lists the draft tree in the order it was grown: the k children of the root, then k * k children of
// the frontier for each later step. A candidate's parent therefore always has a lower number.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace specdec {

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

// The best `limit` of the candidates offered, best first: score descending, then number ascending. One thread.
template <int kCapacity>
class BestList {
 public:
  explicit BestList(int limit) : limit_(limit) {}

  // Numbers must rise from call to call: an equal score never displaces an earlier one.
  void offer(float score, int32_t number) {
    int i = count_;
    if (count_ == limit_) {
      if (limit_ == 0 || !(score > scores_[--i])) return;
    } else {
      ++count_;
    }
    for (; i > 0 && score > scores_[i - 1]; --i) {
      scores_[i] = scores_[i - 1];
      numbers_[i] = numbers_[i - 1];
    }
    scores_[i] = score;
    numbers_[i] = number;
  }

  // Whether offer() would list a later number of this score.
  bool takes(float score) const { return count_ < limit_ || (limit_ > 0 && score > scores_[limit_ - 1]); }

  int count() const { return count_; }
  const int32_t* numbers() const { return numbers_; }
  const float* scores() const { return scores_; }

 private:
  float scores_[kCapacity];
  int32_t numbers_[kCapacity];
  int limit_, count_ = 0;
};

}  // namespace specdec
