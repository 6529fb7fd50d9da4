// Select the best candidates of a row, in order, with one block.
//
// Candidates come in tiles of registers, by increasing index. The best so far and the new tile are first reduced: a
// few evenly spread samples are ranked by counting, and a candidate below the best sample that has enough
// candidates ahead of it cannot be selected. The remaining ones, few more than wanted, are ranked exactly, again
// by counting. Equal scores cost nothing extra: the lower index wins.
//
// Dependent instructions take the time, not the counting. Hence the counting loop of fixed length, and the special
// case of a single tile, which has no previous best.
#pragma once

#include "core/cuda.cuh"

namespace specdec::tree {

// Return the score as an integer of the same order; 0 for a score of -inf: no candidate.
__device__ __forceinline__ uint32_t rising_bits(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes 0
  return score == -INFINITY ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// count += a > b with a predicated addition: the compiler would emit two instructions.
__device__ __forceinline__ void count_if_above(int& count, uint32_t a, uint32_t b) {
  asm("{.reg .pred p; setp.gt.u32 p, %1, %2; @p add.s32 %0, %0, 1;}" : "+r"(count) : "r"(a), "r"(b));
}
__device__ __forceinline__ void count_if_above(int& count, uint64_t a, uint64_t b) {
  asm("{.reg .pred p; setp.gt.u64 p, %1, %2; @p add.s32 %0, %0, 1;}" : "+r"(count) : "l"(a), "l"(b));
}

template <int kBlock, int kPerThread, int kCapacity, bool kOneTile>
class BestCandidates {
 public:
  static constexpr int kThreads = kBlock, kEach = kPerThread, kTile = kThreads * kEach;
  static_assert(kCapacity <= kThreads, "one thread for each of the best");

  // Candidates i, i + kThreads, ... of a tile, which thread i holds.
  struct Tile {
    uint32_t scores[kEach];  // rising_bits; 0: no candidate
    int32_t tokens[kEach], parents[kEach];
  };

 private:
  static constexpr int kSamples = 16,
                       kCounters = kThreads / kSamples;  // threads that share the counting for each sample
  static constexpr int kHeld = kOneTile ? 0 : kCapacity, kMost = kTile + kHeld;
  static constexpr int kShare = (kMost / kCounters + 3) / 4 * 4;  // scores per counter
  static constexpr int kHints = 1024;
  static_assert(kCounters * kShare - kTile <= kThreads, "one thread for each score that pads");
  static_assert(!kOneTile || kTile <= kHints, "hints are exact");

 public:
  struct Storage {  // in smem
    alignas(16) uint32_t scores[kCounters * kShare];
    alignas(16) int32_t ahead[kSamples][kCounters + 4];  // rows start in different banks
    uint64_t keys[kMost];
    int32_t tokens[kMost], parents[kMost];
    uint32_t best_scores[kCapacity];
    int32_t best_indices[kCapacity], best_tokens[kCapacity], best_parents[kCapacity];
    int16_t hints[kHints];
    int32_t kept;
  };

  __device__ BestCandidates(Storage& storage, int limit) : s_(storage), limit_(limit) {}

  // Return whether this thread's part of a later tile may change the selection. An equal score comes too late.
  __device__ bool improves(const Tile& tile) const {
    const uint32_t least = count_ < limit_ ? 0 : limit_ > 0 ? s_.best_scores[limit_ - 1] : UINT32_MAX;
    bool better = false;
    for (int e = 0; e < kEach; ++e) better |= tile.scores[e] > least;
    return better;
  }

  // Step 1, before a barrier: publish a tile to the block.
  __device__ void publish(const Tile& tile) {
    const int i = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int e = 0; e < kEach; ++e) s_.scores[count_ + e * kThreads + i] = tile.scores[e];
    if constexpr (!kOneTile) {
      if (i < count_) s_.scores[i] = s_.best_scores[i];
      if (i < kCounters * kShare - kTile - count_) s_.scores[count_ + kTile + i] = 0;
    }
    if (i == 0) s_.kept = 0;
  }

  // Step 2, before a barrier: rank the samples among the current best and `width` candidates of the tile.
  __device__ void count(int width) {
    const int n = count_ + width;
    if (is_small(n)) return;
    const unsigned sample = threadIdx.x % kSamples, counter = threadIdx.x / kSamples;
    const int begin = static_cast<int>(counter) * kShare, at = sample_at(sample, n);
    // Within a counter's own share ties are not counted, which is conservative.
    const uint32_t score = s_.scores[at] - (at >= begin + kShare ? 1 : 0);
    uint4 fours[kShare / 4];
#pragma unroll
    for (int j = 0; j < kShare / 4; ++j) fours[j] = reinterpret_cast<const uint4*>(s_.scores + begin)[j];
    int ahead[4] = {};
#pragma unroll
    for (const uint4& four : fours) {
      count_if_above(ahead[0], four.x, score);
      count_if_above(ahead[1], four.y, score);
      count_if_above(ahead[2], four.z, score);
      count_if_above(ahead[3], four.w, score);
    }
    s_.ahead[sample][counter] = (ahead[0] + ahead[1]) + (ahead[2] + ahead[3]);
  }

  // Step 3: merge the tile, whose `width` candidates have the indices from `first` on. Ends with a barrier.
  __device__ void merge(const Tile& tile, int64_t first, int width) {
    const int i = static_cast<int>(threadIdx.x);
    const Pivot pivot = find_pivot(count_ + width);
    bool keep[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) keep[e] = pivot.reached_by(tile.scores[e], count_ + e * kThreads + i);
    int place[kEach];
    assign_places(keep, place);
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (keep[e])
        put(place[e], tile.scores[e], static_cast<int32_t>(first + e * kThreads + i), tile.tokens[e], tile.parents[e]);
    if (!kOneTile && count_ > 0) {
      const bool keep_held[1] = {i < count_ && pivot.reached_by(s_.best_scores[i], i)};
      int place_held[1];
      assign_places(keep_held, place_held);
      if (keep_held[0])
        put(place_held[0], s_.best_scores[i], s_.best_indices[i], s_.best_tokens[i], s_.best_parents[i]);
    }
    __syncthreads();
    rank(s_.kept);
    __syncthreads();
  }

  __device__ int count() const { return count_; }
  __device__ int32_t index(int rank) const { return s_.best_indices[rank]; }
  __device__ int32_t token(int rank) const { return s_.best_tokens[rank]; }
  __device__ int32_t parent(int rank) const { return s_.best_parents[rank]; }

  // Return the rank of a selected candidate.
  __device__ int rank_of(int32_t index) const {
    int rank = s_.hints[hint_of(index)];
    if constexpr (!kOneTile)
      for (int tries = 0; tries < count_ && s_.best_indices[rank] != index; ++tries)
        rank = rank > 0 ? rank - 1 : count_ - 1;
    return rank;
  }

 private:
  // Candidates with this score at positions up to `at`, or with a better score. Positions index s_.scores, where the
  // lower candidate index comes first among equal scores.
  struct Pivot {
    uint32_t score;
    int at;
    __device__ bool reached_by(uint32_t other, int other_at) const {
      return other > score || (other == score && other != 0 && other_at <= at);
    }
  };

  static __device__ uint32_t hint_of(int32_t index) { return static_cast<uint32_t>(index) % kHints; }

  static __device__ int sample_at(uint32_t sample, uint32_t n) {
    return static_cast<int>(__umulhi((sample + 1) * 0x9e3779b9u, n));  // multiples of the golden ratio: evenly spread
  }

  // Return whether there are too few candidates to reduce.
  __device__ bool is_small(int n) const { return n <= limit_ + 2 * kSamples; }

  // Return a pivot that at least `limit_` of the first n reach, or one that all reach.
  __device__ Pivot find_pivot(int n) const {
    constexpr Pivot kAll{0, 0};
    if (is_small(n)) return kAll;
    const unsigned sample = threadIdx.x % kSamples;
    int total = 0;
#pragma unroll
    for (int c = 0; c < kCounters; c += 4) {
      const auto four = *reinterpret_cast<const int4*>(&s_.ahead[sample][c]);
      total += (four.x + four.y) + (four.z + four.w);
    }
    const unsigned best = __reduce_min_sync(kFullMask, total >= limit_ - 1 ? total * kSamples + sample : UINT32_MAX);
    if (best == UINT32_MAX) return kAll;
    const int at = sample_at(best % kSamples, n);
    return {s_.scores[at], at};
  }

  // Assign places in s_.keys to the candidates that a thread keeps.
  template <int kCount>
  __device__ void assign_places(const bool (&keep)[kCount], int (&place)[kCount]) {
    const unsigned lane = threadIdx.x % kWarp;
    int kept = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const unsigned lanes = __ballot_sync(kFullMask, keep[e]);
      place[e] = kept + __popc(lanes & ((1u << lane) - 1));
      kept += __popc(lanes);
    }
    int first = 0;
    if (lane == 0) first = atomicAdd(&s_.kept, kept);
    first = __shfl_sync(kFullMask, first, 0);
#pragma unroll
    for (int e = 0; e < kCount; ++e) place[e] += first;
  }

  __device__ void put(int place, uint32_t score, int32_t index, int32_t token, int32_t parent) {
    s_.keys[place] = uint64_t{score} << 32 | ~static_cast<uint32_t>(index);
    s_.tokens[place] = token;
    s_.parents[place] = parent;
  }

  // Rank the first n keys and store the best in order. Threads beyond one per candidate share the counting.
  __device__ void rank(int n) {
    if (n <= kThreads / 4)
      rank_shared<4>(n);
    else if (n <= kThreads / 2)
      rank_shared<2>(n);
    else
      rank_shared<1>(n);
    count_ = min(n, limit_);
  }

  template <int kSharing>
  __device__ void rank_shared(int n) {
    const unsigned part = threadIdx.x % kSharing;
    for (int first = 0; first < n; first += kThreads / kSharing) {
      const int j = first + static_cast<int>(threadIdx.x / kSharing);
      const uint64_t key = j < n ? s_.keys[j] : UINT64_MAX;
      int place = 0;
#pragma unroll 4
      for (int other = part; other < n; other += kSharing) count_if_above(place, s_.keys[other], key);
#pragma unroll
      for (int distance = 1; distance < kSharing; distance *= 2) place += __shfl_xor_sync(kFullMask, place, distance);
      if (j < n && part == 0 && place < limit_) {
        const auto index = static_cast<int32_t>(~static_cast<uint32_t>(key));
        s_.best_tokens[place] = s_.tokens[j];
        s_.best_parents[place] = s_.parents[j];
        s_.hints[hint_of(index)] = static_cast<int16_t>(place);
        s_.best_indices[place] = index;
        if constexpr (!kOneTile) s_.best_scores[place] = static_cast<uint32_t>(key >> 32);
      }
    }
  }

  Storage& s_;
  int limit_, count_ = 0;  // equal in every thread
};

}  // namespace specdec::tree
