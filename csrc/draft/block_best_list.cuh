// BestList (candidates.h) built by a whole block: the best `limit` of a stream of candidates, best first.
//
// Candidates come in tiles of one per thread. Every thread counts who is ahead of its own candidate, in the list held
// so far and in the tile; that count is its place in the new list, and counting stops once the place is beyond the
// limit. Work per tile is O(kThreads + limit) a thread, shared memory does not grow with the stream.
#pragma once

#include "core/cuda.cuh"

namespace specdec {

template <int kThreads, int kCapacity>
class BlockBestList {
 public:
  struct Storage {  // in shared memory
    float scores[2][kCapacity];
    int32_t numbers[2][kCapacity];
    float tile[kThreads];
  };

  __device__ BlockBestList(Storage& storage, int limit) : s_(storage), limit_(limit) {}

  // Called by all threads of the block. Numbers rise with the thread and from call to call, scores are not NaN, and
  // threads from `width` on are not present. Ends with the list complete and visible to the block.
  __device__ void offer(int width, bool present, float score, int32_t number) {
    s_.tile[threadIdx.x] = present ? score : NAN;  // NaN is ahead of nothing
    const int arrived = __syncthreads_count(present);

    const float* held = s_.scores[side_];
    for (int h = threadIdx.x; h < count_; h += kThreads) {
      int place = h;
      for (int t = 0; t < width && place < limit_; ++t) place += s_.tile[t] > held[h];
      if (place < limit_) put(place, held[h], s_.numbers[side_][h]);
    }
    if (present) {
      int place = 0;
      while (place < count_ && held[place] >= score) ++place;  // what is held has lower numbers, and is sorted
      for (int t = 0; t < width && place < limit_; ++t) {
        const float other = s_.tile[t];
        place += other > score || (other == score && t < static_cast<int>(threadIdx.x));
      }
      if (place < limit_) put(place, score, number);
    }
    count_ = min(limit_, count_ + arrived);
    side_ ^= 1;
    __syncthreads();
  }

  __device__ int count() const { return count_; }
  __device__ const int32_t* numbers() const { return s_.numbers[side_]; }
  __device__ const float* scores() const { return s_.scores[side_]; }

 private:
  __device__ void put(int place, float score, int32_t number) {
    s_.scores[side_ ^ 1][place] = score;
    s_.numbers[side_ ^ 1][place] = number;
  }

  Storage& s_;
  int limit_, count_ = 0, side_ = 0;  // the same in every thread
};

}  // namespace specdec
