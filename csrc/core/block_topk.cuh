// The k best of many entries that the threads of a block hold, for k much smaller than their number.
//
// An entry is a 64-bit key, unique in the block: its score's order_key above its complemented number, so that a larger
// key is the better entry and equal scores go to the lower number. The k-th largest of the maxima of some groups of
// threads is a pivot that at least k entries reach and few others do. Only those are listed and ranked against each
// other.
#pragma once

#include "core/cuda.cuh"
#include "core/exact_math.h"

namespace specdec {

constexpr __host__ __device__ uint64_t entry_key(uint32_t score_key, uint32_t number) {
  return static_cast<uint64_t>(score_key) << 32 | static_cast<uint32_t>(~number);
}
constexpr __host__ __device__ uint32_t key_score(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
constexpr __host__ __device__ uint32_t key_number(uint64_t key) { return ~static_cast<uint32_t>(key); }

template <int kThreads>
class BlockTopk {
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kFewLanes = 4;  // of a small group; a large one is a warp
  static constexpr int kMaxGroups = kThreads / kFewLanes;

 public:
  static constexpr int kMaxK = kMaxGroups;
  static constexpr int kCapacity = 2 * kThreads;

  struct Storage {  // in shared memory
    alignas(16) uint64_t list[kCapacity];
    alignas(16) uint32_t maxima[kMaxGroups];
    uint32_t best[kWarps], pivot[kWarps];
    int count, narrowed;
  };

  __device__ explicit BlockTopk(Storage& storage) : s_(storage) {}

  // A score that at least k entries of the block reach, or 0 where it has not that many groups of threads with
  // entries. `mine` is the best score_key of this thread's entries (0: none), `busy` the number of threads with any
  // (the first ones). Called by all threads, as are the others; afterwards best() is the block's best score_key.
  __device__ uint32_t find_pivot(uint32_t mine, int busy, int k) {
    const bool by_warps = busy == kThreads && 4 * k <= 3 * kWarps;
    const int lanes = by_warps ? kWarp : kFewLanes, groups = kThreads / lanes;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const uint32_t of_warp = __reduce_max_sync(kFullMask, mine);
    if (by_warps) mine = of_warp;
    for (int offset = 1; offset < kFewLanes; offset *= 2) mine = max(mine, __shfl_xor_sync(kFullMask, mine, offset));
    if (threadIdx.x % lanes == 0) s_.maxima[threadIdx.x / lanes] = mine;
    if (lane == 0) s_.best[warp] = of_warp;
    if (threadIdx.x == 0) s_.count = 0;
    __syncthreads();

    int ahead = 0;  // groups ahead of this one, which its lanes count together
#pragma unroll 4
    for (int i = lane % lanes; i < groups / 4; i += lanes) {
      const uint4 others = reinterpret_cast<const uint4*>(s_.maxima)[i];
      ahead += others.x > mine;
      ahead += others.y > mine;
      ahead += others.z > mine;
      ahead += others.w > mine;
    }
    if (by_warps) {
      ahead = __reduce_add_sync(kFullMask, ahead);
    } else {
      for (int offset = 1; offset < kFewLanes; offset *= 2) ahead += __shfl_xor_sync(kFullMask, ahead, offset);
    }
    // The k-th largest maximum is the least that has fewer than k ahead of it.
    const uint32_t least = __reduce_min_sync(kFullMask, ahead < k ? mine : ~0u);
    if (lane == 0) s_.pivot[warp] = least;
    __syncthreads();
    uint32_t pivot = ~0u;
    for (const uint32_t of_warp : s_.pivot) pivot = min(pivot, of_warp);
    return pivot;
  }

  // The best score_key of the block, after find_pivot(): 0 where it has no entries.
  __device__ uint32_t best() const {
    uint32_t best = 0;
    for (const uint32_t of_warp : s_.best) best = max(best, of_warp);
    return best;
  }

  // Lists the entries that reach the pivot, or where those are too many, the best of them: at least k in any case, if
  // the block has them. visit(least, f) calls f(key) for each of this thread's entries with a score_key of at least
  // `least`; it may call it for others too. Ends in a barrier.
  template <class Visit>
  __device__ void collect(uint32_t pivot, int k, uint32_t num_numbers, Visit visit) {
    uint64_t least = static_cast<uint64_t>(pivot) << 32;
    append(least, visit);
    __syncthreads();
    if (s_.count <= kCapacity) return;
    least = narrow(least, k, num_numbers, visit);
    if (threadIdx.x == 0) s_.count = 0;
    __syncthreads();
    append(least, visit);
    __syncthreads();
  }

  // In place of find_pivot() and collect(), for up to one entry a thread: thread i < count has entry i. Ends in a
  // barrier.
  __device__ void list_all(int count, uint64_t mine) {
    if (static_cast<int>(threadIdx.x) < count) s_.list[threadIdx.x] = mine;
    if (threadIdx.x == 0) s_.count = count;
    __syncthreads();
  }

  // After collect() or list_all(): calls emit(place, key) once for each of the k best, by some thread.
  template <class Emit>
  __device__ void emit_best(int k, Emit emit) {
    const int count = s_.count;
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
      if (place < k) emit(place, key);
    }
  }

  __device__ int count() const { return s_.count; }

 private:
  template <class Visit>
  __device__ void append(uint64_t least, Visit visit) {
    visit(key_score(least), [&](uint64_t key) {
      if (key < least) return;
      const int at = atomicAdd(&s_.count, 1);
      if (at < kCapacity) s_.list[at] = key;
    });
  }

  // Many equal scores: bisects the keys, which are unique, for one that at least k entries reach, and not more than
  // fit. First the pivot's score itself, since it is the one most likely to be shared.
  template <class Visit>
  __device__ uint64_t narrow(uint64_t low, int k, uint32_t num_numbers, Visit visit) {
    uint64_t high = ~uint64_t{0};  // too few reach `high`, too many reach `low`
    uint64_t middle = low + (uint64_t{1} << 32);
    while (true) {
      __syncthreads();  // everyone has read what the last turn counted
      if (threadIdx.x == 0) s_.narrowed = 0;
      __syncthreads();
      int reach = 0;
      visit(key_score(middle), [&](uint64_t key) { reach += key >= middle; });
      reach = __reduce_add_sync(kFullMask, reach);
      if (threadIdx.x % kWarp == 0) atomicAdd(&s_.narrowed, reach);
      __syncthreads();
      reach = s_.narrowed;
      if (reach >= k && reach <= kCapacity) return middle;
      (reach < k ? high : low) = middle;
      if (key_score(high - 1) == key_score(low)) low = max(low, entry_key(key_score(low), num_numbers - 1));
      middle = low + (high - low) / 2;
    }
  }

  Storage& s_;
};

}  // namespace specdec
