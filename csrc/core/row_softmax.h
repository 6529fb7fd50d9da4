// RowSoftmax: softmax of a row of floats on the CPU, in loops that compilers vectorize.
#pragma once

#include <algorithm>

#include "core/best_list.h"
#include "core/exact_math.h"
#include "core/floats.h"

namespace specdec {

// Return 2^t for t from -126 to 0, to 1e-7, in operations that every compiler vectorizes: the nearest integer goes to
// the exponent, the remainder through a minimax polynomial.
inline float exp2_vectorised(float t) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = t + kRound, rest = t - (shifted - kRound);
  float m = 0x1.41db4cp-13f;
  m = m * rest + 0x1.5f46eap-10f;
  m = m * rest + 0x1.3b2db2p-7f;
  m = m * rest + 0x1.c6aed0p-5f;
  m = m * rest + 0x1.ebfbdap-3f;
  m = m * rest + 0x1.62e430p-1f;
  m = m * rest + 1.0f;
  return m * bits_float((float_bits(shifted) - float_bits(kRound) + 127) << 23);
}

// The largest entry of a row (NaN counts as -inf) and the sum of 2^((x - max) * scale); -inf and 0 if no entry is above
// -inf.
class RowSoftmax {
 public:
  template <class T>
  RowSoftmax(const T* row, int64_t size, float scale) : scale_(scale) {
    constexpr int64_t kLanes = 16, kBlock = 1024;  // float sums no longer than kBlock / kLanes
    float largest[kLanes];
    std::fill_n(largest, kLanes, max_);
    const auto larger = [](float a, float b) { return b > a ? b : a; };
    int64_t v = 0;
    for (; v + kLanes <= size; v += kLanes)
      for (int64_t i = 0; i < kLanes; ++i) largest[i] = larger(largest[i], to_float(row[v + i]));
    for (; v < size; ++v) max_ = larger(max_, to_float(row[v]));
    for (const float x : largest) max_ = larger(max_, x);
    if (max_ == -INFINITY) return;

    const auto weight = [&](float x) {
      constexpr float kLeast = -126;
      const float t = below_max(x, max_) * scale_;
      return exp2_vectorised(t >= kLeast ? t : kLeast);
    };
    for (int64_t start = 0; start < size; start += kBlock) {
      const int64_t end = std::min(start + kBlock, size);
      float sums[kLanes] = {};
      for (v = start; v + kLanes <= end; v += kLanes)
        for (int64_t i = 0; i < kLanes; ++i) sums[i] += weight(to_float(row[v + i]));
      for (; v < end; ++v) sum_ += weight(to_float(row[v]));
      for (const float x : sums) sum_ += x;
    }
    log_sum_ = static_cast<float>(std::log(sum_));
  }

  float max() const { return max_; }

  // Return log p, clamped to at most 0 despite rounding: build_tree relies on children never scoring above parents.
  float logprob(float x) const {
    return x > -INFINITY ? std::min(below_max(x, max_) * scale_ * kLn2 - log_sum_, 0.0f) : -INFINITY;
  }

 private:
  float scale_, max_ = -INFINITY, log_sum_ = 0;
  double sum_ = 0;
};

// Offer a row's entries (NaN as -inf) to `best`. Most are not good enough, which is tested for many at a time.
template <class T, int kCapacity>
void offer_row(const T* row, int64_t size, BestList<kCapacity>& best) {
  constexpr int64_t kLanes = 16;
  for (int64_t start = 0; start < size; start += kLanes) {
    const int64_t end = std::min(start + kLanes, size);
    float values[kLanes];
    int num_accepted = 0;
    for (int64_t i = 0; i < end - start; ++i) {
      const float x = to_float(row[start + i]);
      values[i] = x == x ? x : -INFINITY;
      num_accepted += best.accepts(values[i]);
    }
    for (int64_t i = 0; num_accepted > 0 && i < end - start; ++i)
      best.offer(values[i], static_cast<int32_t>(start + i));
  }
}

}  // namespace specdec
