// The best of many scored things, found one by one.
#pragma once

#include <cstdint>

namespace specdec {

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
