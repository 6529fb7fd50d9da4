// BlockTopk: the k best of many entries held by the threads of a block, for k much smaller than their id.
//
// An entry is a 64-bit key, unique in the block: its score's order_key in the high word, its complemented id in the low
// word. So a larger key is the better entry, and equal scores go to the lower id. The k-th largest of the maxima of
// groups of threads is a pivot: at least k entries reach it and few others do. Only those are listed and ranked.
#pragma once

#include "core/cuda.cuh"
#include "core/exact_math.h"

namespace specdec {

constexpr __host__ __device__ uint64_t entry_key(uint32_t score_key, uint32_t id) {
  return static_cast<uint64_t>(score_key) << 32 | static_cast<uint32_t>(~id);
}
constexpr __host__ __device__ uint32_t key_score(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
constexpr __host__ __device__ uint32_t key_id(uint64_t key) { return ~static_cast<uint32_t>(key); }

template <int kThreads>
class BlockTopk {
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kFewLanes = 4;  // lanes of a small group; a large group is a warp
  static constexpr int kMaxGroups = kThreads / kFewLanes;

 public:
  static constexpr int kMaxK = kMaxGroups;
  static constexpr int kCapacity = 2 * kThreads;

  struct Storage {  // in shared memory
    alignas(16) uint64_t list[kCapacity];
    alignas(16) uint32_t maxima[kMaxGroups];
    uint32_t best[kWarps], pivot[kWarps];
    int count;
  };

  __device__ explicit BlockTopk(Storage& storage) : s_(storage) {}

  // Return a score key that at least k entries of the block reach, or 0 if fewer than k groups of threads have entries.
  // `mine` is the score key of one of this thread's entries, preferably its best (0: no entries); `all` says that every
  // thread has entries. Like the other methods, called by all threads.
  __device__ uint32_t find_pivot(uint32_t mine, bool all, int k) {
    const bool by_warps = all && 4 * k <= 3 * kWarps;
    const int lanes = by_warps ? kWarp : kFewLanes, groups = kThreads / lanes;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const uint32_t of_warp = __reduce_max_sync(kFullMask, mine);
    if (by_warps) mine = of_warp;
    for (int offset = 1; offset < kFewLanes; offset *= 2) mine = max(mine, __shfl_xor_sync(kFullMask, mine, offset));
    if (threadIdx.x % lanes == 0) s_.maxima[threadIdx.x / lanes] = mine;
    if (lane == 0) s_.best[warp] = of_warp;
    if (threadIdx.x == 0) s_.count = 0;
    __syncthreads();

    // The k-th largest maximum is the least one with fewer than k larger ones.
    if (groups <= kWarp) {  // every warp finds it, with at least one lane per group
      const uint32_t theirs = s_.maxima[lane % groups];
      int ahead = 0;
#pragma unroll 4
      for (int i = 0; i < groups / 4; ++i) ahead += num_above(theirs, i);
      return __reduce_min_sync(kFullMask, ahead < k ? theirs : ~0u);
    }

    int ahead = 0;  // maxima above that of this thread's group, whose lanes count together
#pragma unroll 2
    for (int i = lane % lanes; i < groups / 4; i += lanes) ahead += num_above(mine, i);
    for (int offset = 1; offset < kFewLanes; offset *= 2) ahead += __shfl_xor_sync(kFullMask, ahead, offset);
    const uint32_t least = __reduce_min_sync(kFullMask, ahead < k ? mine : ~0u);
    if (lane == 0) s_.pivot[warp] = least;
    __syncthreads();
    uint32_t pivot = ~0u;
    for (const uint32_t of_warp : s_.pivot) pivot = min(pivot, of_warp);
    return pivot;
  }

  // Return the largest `mine` of the block; call it after find_pivot().
  __device__ uint32_t best() const {
    uint32_t best = 0;
    for (const uint32_t of_warp : s_.best) best = max(best, of_warp);
    return best;
  }

  // List the entries that reach the pivot: at least k, if the block has them. If they are too many, because many scores
  // are equal, bisect the (unique) keys for one that at least k entries reach and no more than fit. visit(least, f)
  // calls f(key) for each of the block's entries with a score key of at least `least`, in any thread; it may call it
  // for others, too. Ends in a barrier.
  template <class Visit>
  __device__ void collect(uint32_t pivot, int k, uint32_t num_ids, Visit visit) {
    const uint64_t reached = static_cast<uint64_t>(pivot) << 32;
    uint64_t low = reached, high = ~uint64_t{0}, least = reached;  // too many reach `low`, too few `high`
    while (true) {
      visit(key_score(least), [&](uint64_t key) {
        if (key >= least) append(key);
      });
      __syncthreads();
      const int count = s_.count;
      if (count <= kCapacity && (count >= k || least == reached)) return;
      if (least == reached) {  // most likely, the pivot's own score is the one that many entries share
        least += uint64_t{1} << 32;
      } else {
        (count < k ? high : low) = least;
        if (key_score(high - 1) == key_score(low)) low = max(low, entry_key(key_score(low), num_ids - 1));
        least = low + (high - low) / 2;
      }
      clear();
    }
  }

  // Empty the list, between two barriers.
  __device__ void clear() {
    __syncthreads();
    if (threadIdx.x == 0) s_.count = 0;
    __syncthreads();
  }
  // Append to the list, up to its capacity; called by any thread.
  __device__ void append(uint64_t key) {
    if (*const_cast<volatile int*>(&s_.count) > kCapacity) return;
    const int at = atomicAdd(&s_.count, 1);
    if (at < kCapacity) s_.list[at] = key;
  }

  // Rank the list, after a barrier: for each of the k best, one thread calls put(rank, key).
  template <class Put>
  __device__ void rank(int k, Put put) {
    const int count = s_.count;
#pragma unroll 1
    for (int e = threadIdx.x; e < count; e += kThreads) {
      const uint64_t key = s_.list[e];
      int place = 0, i = 0;
#pragma unroll 4
      for (; i + 2 <= count; i += 2) {
        const ulonglong2 other = *reinterpret_cast<const ulonglong2*>(&s_.list[i]);
        place += other.x > key;
        place += other.y > key;
      }
      if (i < count) place += s_.list[i] > key;
      if (place < k) put(place, key);
    }
  }

  __device__ int count() const { return s_.count; }

 private:
  // Count how many of the i-th four maxima are larger than `maximum`.
  __device__ int num_above(uint32_t maximum, int i) const {
    const uint4 four = reinterpret_cast<const uint4*>(s_.maxima)[i];
    return (four.x > maximum) + (four.y > maximum) + (four.z > maximum) + (four.w > maximum);
  }

  Storage& s_;
};

}  // namespace specdec
