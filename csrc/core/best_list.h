// BestList: the k best of a stream of scored ids, kept sorted by insertion.
#pragma once

#include <cstdint>

namespace specdec {

// The best `limit` candidates offered, best first: score descending, then id ascending. For one thread.
template <int kCapacity>
class BestList {
 public:
  explicit BestList(int limit) : limit_(limit) {}

  // Insert a candidate if it is good enough. Ids must increase from call to call: an equal score never displaces an
  // earlier one.
  void offer(float score, int32_t id) {
    int i = count_;
    if (count_ == limit_) {
      if (limit_ == 0 || !(score > scores_[--i])) return;
    } else {
      ++count_;
    }
    for (; i > 0 && score > scores_[i - 1]; --i) {
      scores_[i] = scores_[i - 1];
      ids_[i] = ids_[i - 1];
    }
    scores_[i] = score;
    ids_[i] = id;
  }

  // Return whether offer() would insert a later id with this score.
  bool accepts(float score) const { return count_ < limit_ || (limit_ > 0 && score > scores_[limit_ - 1]); }

  int count() const { return count_; }
  const int32_t* ids() const { return ids_; }
  const float* scores() const { return scores_; }

 private:
  float scores_[kCapacity];
  int32_t ids_[kCapacity];
  int limit_, count_ = 0;
};

}  // namespace specdec
