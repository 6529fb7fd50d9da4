// Draws from a row of weights by a coin that the caller threw: what chains and trees of other engines' layouts share.
//
// Weights are integers in units of 2^-40, so that sums do not depend on their order and both devices draw the same
// token. A row is anything with `uint64_t weight(int64_t v) const`. The walks are written once, against a `Rows` that
// adds up a row and finds the drawn entry: SerialRows here, a block of threads in block_rows.cuh, all of whose threads
// take the same steps.
#pragma once

#include "core/exact_math.h"
#include "verify/logit_row.h"

namespace specdec::compat {

// Sums of as many weights fit 64 bits.
constexpr int64_t kMaxCompatVocab = int64_t{1} << 22;

// A probability as a weight; what is none counts as 0, or as 1 above that.
SD_HD uint64_t weight_of(float p) {
  constexpr float kOne = 0x1p40f;
  return p > 0 ? static_cast<uint64_t>(p < 1 ? p * kOne : kOne) : 0;
}
SD_HD float probability(float p) { return p > 0 ? (p < 1 ? p : 1) : 0; }

// The entry drawn is the first up to which weights sum to more than this: the coin's share of their total.
SD_HD uint64_t share_of(float coin, uint64_t total) {
  constexpr float kOne = 0x1p64f;
  const uint64_t share = coin > 0 ? (coin < 1 ? static_cast<uint64_t>(coin * kOne) : ~uint64_t{0}) : 0;
  return mul_high(share, total);
}

// Orders the entries of a row: the larger one first, then the lower number. NaN counts as -inf.
SD_HD uint64_t peak_key(float x, int64_t v) {
  return static_cast<uint64_t>(order_key(x)) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(v));
}
SD_HD float peak_value(uint64_t key) { return key_float(static_cast<uint32_t>(key >> 32)); }
SD_HD int64_t peak_number(uint64_t key) { return static_cast<uint32_t>(~static_cast<uint32_t>(key)); }

// Probabilities as they were given.
struct GivenProbabilities {
  const float* p;  // [vocab]
  SD_HD float operator()(int64_t v) const { return p[v]; }
};

// The softmax of logits, each entry rounded to a float.
template <class T>
struct SoftmaxWeights {
  verify::LogitRow<T> logits;
  float max;
  SD_HD uint64_t weight(int64_t v) const { return exp2_weight(mul(below_max(logits[v], max), kLog2e)); }
};
template <class T>
struct SoftmaxProbabilities {
  SoftmaxWeights<T> weights;
  float unit;  // one over the sum of the weights
  SD_HD float operator()(int64_t v) const { return mul(static_cast<float>(weights.weight(v)), unit); }
};
// What a draft that had all of the probability left of them.
template <class T>
struct OtherWeights {
  SoftmaxWeights<T> weights;
  int64_t token;
  SD_HD uint64_t weight(int64_t v) const { return v == token ? 0 : weights.weight(v); }
};

// What the draft gave each token, where outside 0 to 1 counts as 0.
struct DraftProbabilities {
  const float* q = nullptr;  // [vocab], or null: nothing
  SD_HD float operator()(int64_t v) const { return q != nullptr && q[v] >= 0 && q[v] <= 1 ? q[v] : 0.0f; }
};

// What a draft left of the target: max(scale * p - q, 0).
template <class Target>
struct Residual {
  Target p;
  DraftProbabilities q;
  float scale = 1;
  SD_HD uint64_t weight(int64_t v) const { return weight_of(sub(mul(scale, p(v)), q(v))); }
};

class SerialRows {
 public:
  template <class Row>
  uint64_t total(const Row& row, int64_t vocab) const {
    uint64_t sum = 0;
    for (int64_t v = 0; v < vocab; ++v) sum += row.weight(v);
    return sum;
  }
  // The number of the entry drawn, or -1 where no entry has a weight.
  template <class Row>
  int64_t draw(const Row& row, int64_t vocab, float coin) const {
    uint64_t left = total(row, vocab);
    if (left == 0) return -1;
    left = share_of(coin, left);
    for (int64_t v = 0;; ++v) {
      const uint64_t weight = row.weight(v);
      if (weight > left) return v;
      left -= weight;
    }
  }
  template <class T>
  uint64_t peak(const verify::LogitRow<T>& row, int64_t vocab) const {
    uint64_t best = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      const uint64_t key = peak_key(row[v], v);
      best = key > best ? key : best;
    }
    return best;
  }
  bool writes() const { return true; }
  void wait_for_writes() const {}
};

}  // namespace specdec::compat
