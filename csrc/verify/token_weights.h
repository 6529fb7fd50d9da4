// CPU: greedy choice, filters and draw over one row of logits.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "verify/logit_row.h"
#include "verify/sampling.h"

namespace specdec::verify {

// Return the lowest id with the largest logit, or -1 if no logit is above -inf.
template <class T>
int32_t largest_id(const LogitRow<T>& row, int64_t vocab) {
  float best = -std::numeric_limits<float>::infinity();
  int32_t id = -1;
  for (int64_t v = 0; v < vocab; ++v) {
    const float x = row[v];
    if (x > best) {
      best = x;
      id = static_cast<int32_t>(v);
    }
  }
  return id;
}

// Weights of all tokens of a row after the request's filters, and their sum.
class TokenWeights {
 public:
  // Compute the weights. Return whether any logit is above -inf; otherwise all weights are 0.
  template <class T>
  bool read(const LogitRow<T>& row, int64_t vocab, const Sampler& sampler) {
    RowScale scale{-std::numeric_limits<float>::infinity(), sampler.scale};
    logits_.resize(static_cast<size_t>(vocab));
    for (int64_t v = 0; v < vocab; ++v) scale.max = std::max(scale.max, logits_[v] = row[v]);
    weights_.assign(logits_.size(), 0);
    total_ = 0;
    if (scale.max == -std::numeric_limits<float>::infinity()) return false;

    const float threshold =
        sampler.filters_by_key() ? threshold_of(sampler, scale) : -std::numeric_limits<float>::infinity();
    for (size_t v = 0; v < logits_.size(); ++v)
      if (logits_[v] >= threshold) total_ += weights_[v] = sampler.after_min_p(scale.weight(logits_[v]));
    return true;
  }

  uint64_t operator[](int64_t v) const { return weights_[static_cast<size_t>(v)]; }
  uint64_t total() const { return total_; }

  // Draw a row's token for an absolute position; return -1 if no logit is above -inf.
  template <class T>
  int32_t draw(const LogitRow<T>& row, int64_t vocab, const Sampler& sampler, uint32_t position) {
    if (!read(row, vocab, sampler)) return -1;
    const uint64_t drawn = drawn_weight(sampler.seed, position, total_);
    uint64_t through = 0;
    for (size_t v = 0; v < weights_.size(); ++v)
      if ((through += weights_[v]) > drawn) return static_cast<int32_t>(v);
    return -1;  // unreachable: total > drawn
  }

 private:
  // Return the lowest logit that top-k and top-p keep.
  float threshold_of(const Sampler& sampler, const RowScale& scale) {
    sorted_ = logits_;
    auto end = sorted_.end();
    if (sampler.top_k > 0) {
      const auto last = sorted_.begin() + sampler.top_k - 1;
      std::nth_element(sorted_.begin(), last, end, std::greater<>());
      const float least = *last;
      end = std::partition(last + 1, end, [=](float x) { return x == least; });  // keep ties with the last one
      if (sampler.top_p >= 1) return least;
    }
    std::sort(sorted_.begin(), end, std::greater<>());
    uint64_t total = 0, reached = 0;
    for (auto x = sorted_.begin(); x != end; ++x) total += scale.weight(*x);
    const uint64_t wanted = top_p_weight(sampler.top_p, total);
    auto x = sorted_.begin();
    while ((reached += scale.weight(*x)) < wanted) ++x;
    return *x;
  }

  std::vector<float> logits_, sorted_;
  std::vector<uint64_t> weights_;
  uint64_t total_ = 0;
};

}  // namespace specdec::verify
