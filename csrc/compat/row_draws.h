// Draws from a row of weights with a random number from the caller, as SGLang's verify functions pass them.
//
// Weights are integers in units of 2^-40, so that sums do not depend on their order and CPU and GPU draw the same
// token. A row is any type with `uint64_t weight(int64_t v) const`. The walk is written once for a `Rows` that sums a
// row and finds the drawn entry: SerialRows here, BlockRows (block_rows.cuh) on a GPU, where all threads of the block
// take the same steps.
#pragma once

#include "core/exact_math.h"

namespace specdec::compat {

// The sum of this many weights fits 64 bits.
constexpr int64_t kMaxCompatVocab = int64_t{1} << 22;

// Return a probability as a weight. NaN and negative values count as 0, values above 1 as 1.
SD_HD uint64_t weight_of(float p) {
  constexpr float kOne = 0x1p40f;
  return p > 0 ? static_cast<uint64_t>(p < 1 ? p * kOne : kOne) : 0;
}
SD_HD float probability(float p) { return p > 0 ? (p < 1 ? p : 1) : 0; }

// Return the share `coin` of the total. The drawn entry is the first whose cumulative weight exceeds it.
SD_HD uint64_t share_of(float coin, uint64_t total) {
  constexpr float kOne = 0x1p64f;
  const uint64_t share = coin > 0 ? (coin < 1 ? static_cast<uint64_t>(coin * kOne) : ~uint64_t{0}) : 0;
  return mul_high(share, total);
}

// Probabilities as given.
struct GivenProbabilities {
  const float* p;  // [vocab]
  SD_HD float operator()(int64_t v) const { return p[v]; }
};

// The draft's probability of each token; values outside 0 to 1 count as 0.
struct DraftProbabilities {
  const float* q = nullptr;  // [vocab], or null: all 0
  SD_HD float operator()(int64_t v) const { return q != nullptr && q[v] >= 0 && q[v] <= 1 ? q[v] : 0.0f; }
};

// The residual max(scale * p - q, 0).
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
  // Return the index of the drawn entry, or -1 if no entry has a weight.
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
  bool writes() const { return true; }
  void wait_for_writes() const {}
};

}  // namespace specdec::compat
