// A row of logits split over the blocks of a cluster, and the exchange of partial results between their warps.
#pragma once

#include "core/cluster.cuh"
#include "core/mbarrier.cuh"
#include "core/warp.cuh"
#include "verify/logit_row.h"

namespace specdec::verify {

constexpr int kRowWarps = kRowThreads / kWarp;

// Blocks that share a row without exchanging data: those with the same y and z in the grid.
struct GridBlocks {
  __device__ static unsigned size() { return gridDim.x; }
  __device__ static unsigned rank() { return blockIdx.x; }
  __device__ static int size_log2() { return __popc(size() - 1); }
};

template <class Blocks = Cluster>
__device__ __forceinline__ int row_warps() {
  return kRowWarps * static_cast<int>(Blocks::size());
}
template <class Blocks = Cluster>
__device__ __forceinline__ int row_warp() {
  return kRowWarps * static_cast<int>(Blocks::rank()) + warp_id();
}

// A row in tiles of 512 bytes, one 16-byte vector per lane. Each warp of the cluster owns a segment of consecutive
// tiles, so prefix sums in order of ids need only the segments' totals. Rows may start at any element.
template <class T, class Blocks = Cluster>
class TiledRow {
 public:
  static constexpr int kItems = sizeof(uint4) / sizeof(T);
  static constexpr int64_t kIdsPerBlock = kRowThreads * kItems;  // ids that occupy a block
  static constexpr int kTile = kItems * kWarp;

  __device__ explicit TiledRow(int64_t vocab) : vocab_(static_cast<int>(vocab)) {}
  __device__ TiledRow(const LogitRow<T>& row, int64_t vocab) : TiledRow(vocab) { move_to(row); }

  // Move to another row. Rows of a walk nearly always have the same alignment.
  __device__ void move_to(const LogitRow<T>& row) {
    row_ = row;
    const int skipped = static_cast<int>(reinterpret_cast<uintptr_t>(row.logits) % sizeof(uint4) / sizeof(T));
    if (skipped != skipped_) divide(skipped);
  }

  // A lane's registers for its warp's segment: its vectors of the tiles from `first` on, -inf beyond the segment.
  static constexpr int kHeld = 8;
  struct Held {
    uint4 raw[kHeld];
    int first;
  };

  // Start to load the row; largest() waits for it.
  __device__ __forceinline__ void begin(Held& held) const { hold(first_, held); }

  // After begin(): return the lane's largest logit and the first of its tiles that has it. The last tiles stay in
  // registers.
  template <bool kAdjusted>
  __device__ __forceinline__ float largest(Held& held, int& its_tile) const {
    float best = -INFINITY;
    its_tile = first_;
    while (true) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        if (held.first + j >= end_) break;
        const float most = largest_of<kAdjusted>(held.first + j, held.raw[j]);
        if (most > best) {
          best = most;
          its_tile = held.first + j;
        }
      }
      if (held.first + kHeld >= end_) return best;
      hold(held.first + kHeld, held);
    }
  }
  __device__ uint4 read(int tile, const Held& held) const {
    return tile < held.first ? read(tile) : held_vector(held, tile - held.first);
  }

  // After largest(): call f(id, x) for the lane's logits that are at least `least`, those in registers first.
  template <bool kAdjusted, class F>
  __device__ __forceinline__ void for_each_at_least(float least, Held& held, F&& f) const {
    while (true) {
      unsigned hits = 0;
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        if (held.first + j >= end_) break;
        if (largest_of<kAdjusted>(held.first + j, held.raw[j]) >= least) hits |= 1u << j;
      }
#pragma unroll 1
      for (; hits != 0; hits &= hits - 1) {
        const int hit = __ffs(static_cast<int>(hits)) - 1, tile = held.first + hit;
        float x[kItems];
        items<kAdjusted>(tile, held_vector(held, hit), x);
#pragma unroll
        for (int i = 0; i < kItems; ++i)
          if (x[i] >= least) f(id_of(tile) + i, x[i]);
      }
      if (held.first <= first_) return;
      hold(held.first - kHeld, held);
    }
  }

  // Call f(tile, raw) for the tiles of this warp's segment, in order, with all lanes; items() and largest_of() decode
  // raw. Four loads are in flight, but the code contains f once: a kernel this short waits for instructions as much as
  // for memory.
  template <class F>
  __device__ __forceinline__ void for_each_tile(F&& f) const {
    constexpr int kLoads = 4;
    for (int first = first_; first < end_; first += kLoads) {
      uint4 raw[kLoads];
      load(first, raw);
      const int end = min(first + kLoads, end_);
#pragma unroll 1
      for (int tile = first; tile < end; ++tile) {
        f(tile, raw[0]);
#pragma unroll
        for (int j = 0; j + 1 < kLoads; ++j) raw[j] = raw[j + 1];
      }
    }
  }

  // Load this lane's vector of any tile: ids from id_of(tile) on, -inf where the id does not exist.
  __device__ uint4 read(int tile) const { return whole(id_of(tile)) ? *vector(id_of(tile)) : partial(id_of(tile)); }
  template <bool kAdjusted>
  __device__ __forceinline__ void items(int tile, const uint4& raw, float (&x)[kItems]) const {
    const int id = id_of(tile);
    const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      x[i] = to_float(values[i]);
      if (kAdjusted && id + i >= 0 && id + i < vocab_) x[i] = row_.adjusted(x[i], id + i);
    }
  }
  template <bool kAdjusted>
  __device__ __forceinline__ float largest_of(int tile, const uint4& raw) const {
    if constexpr (!kAdjusted && std::is_same_v<T, BFloat16>) {
      return largest_pair<__nv_bfloat162>(raw);
    } else if constexpr (!kAdjusted && std::is_same_v<T, Half>) {
      return largest_pair<__half2>(raw);
    } else {
      float x[kItems];
      items<kAdjusted>(tile, raw, x);
#pragma unroll
      for (int i = 1; i < kItems; ++i) x[0] = fmaxf(x[0], x[i]);
      return x[0];
    }
  }
  __device__ int id_of(int tile) const { return tile * kTile + lane_id() * kItems - skipped_; }

  // Return the first tile of a warp's segment. The segment ends before first_of(warp + 1).
  __device__ int first_of(int row_warp) const {
    return min(row_warp * segment_tiles_, (vocab_ + skipped_ + kTile - 1) / kTile);
  }

 private:
  __device__ void divide(int skipped) {
    skipped_ = skipped;
    const int tiles = (vocab_ + skipped_ + kTile - 1) / kTile;  // element p of the vector grid is id p - skipped_
    segment_tiles_ = (tiles + row_warps<Blocks>() - 1) >> (Blocks::size_log2() + 4);
    static_assert(kRowWarps == 16);
    first_ = min(row_warp<Blocks>() * segment_tiles_, tiles);
    end_ = min(first_ + segment_tiles_, tiles);
    cut_ = (first_ == 0 && skipped_ > 0) || (end_ == tiles && (vocab_ + skipped_) % kItems != 0);
  }
  __device__ bool whole(int id) const { return id >= 0 && id + kItems <= vocab_; }
  __device__ const uint4* vector(int id) const { return reinterpret_cast<const uint4*>(row_.logits + id); }

  __device__ __forceinline__ static uint4 held_vector(const Held& held, int index) {
    uint4 raw = held.raw[0];
#pragma unroll
    for (int j = 1; j < kHeld; ++j)
      if (j == index) raw = held.raw[j];
    return raw;
  }
  __device__ __forceinline__ void hold(int first, Held& held) const {
    held.first = first;
    load(first, held.raw);
  }

  // Issue all loads at once. The one or two vectors that a row's ends cut are loaded afterwards, in code that few warps
  // run.
  template <int kCount>
  __device__ __forceinline__ void load(int first, uint4 (&raw)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j % 4 == 0 && first + j >= end_) break;
      raw[j] = minus_inf();
      if (first + j < end_ && whole(id_of(first + j))) raw[j] = *vector(id_of(first + j));
    }
    if (!cut_) return;
#pragma unroll 1
    for (int j = 0; j < kCount && first + j < end_; ++j) {
      if (whole(id_of(first + j))) continue;
      const uint4 ends = partial(id_of(first + j));
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i == j) raw[i] = ends;
    }
  }
  __device__ uint4 partial(int id) const {
    uint4 raw;
    T* items = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      items[i] = id + i >= 0 && id + i < vocab_ ? row_.logits[id + i] : from_float<T>(-INFINITY);
    return raw;
  }
  __device__ static uint4 minus_inf() {
    uint4 raw;
    T* items = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < kItems; ++i) items[i] = from_float<T>(-INFINITY);
    return raw;
  }

  // Two elements at a time; NaN loses, as in fmaxf.
  template <class Pair>
  __device__ __forceinline__ static float largest_pair(const uint4& raw) {
    const Pair* pairs = reinterpret_cast<const Pair*>(&raw);
    const Pair most = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(__low2float(most), __high2float(most));
  }

  LogitRow<T> row_;
  int vocab_, skipped_ = -1, segment_tiles_, first_, end_;
  bool cut_;  // whether a row's end cuts a vector of this segment
};

// All-gather of words from every warp of the cluster. A Hopper block stores them into its neighbours' shared memory,
// and they complete transactions on an mbarrier there (st.async): no fence and no cluster-wide barrier. Two buffers
// alternate: a warp that writes a buffer again has heard from every warp that it no longer reads that buffer.
class Exchange {
 public:
  static constexpr int kWords = 512;
  struct Storage {  // in smem
    alignas(16) uint64_t words[2][kWords];
    Mbarrier barriers[2];
  };

  // Every block must have started before data can be sent to it. Blocks announce that here and wait in join().
  __device__ explicit Exchange(Storage& storage) : s_(storage) {
#if __CUDA_ARCH__ >= 900
    if (Cluster::size() == 1) return;
    if (threadIdx.x == 0) {
      s_.barriers[0].init(1);
      s_.barriers[1].init(1);
      Cluster::fence_barrier_init();
    }
    Cluster::arrive();
#endif
  }
  __device__ void join() {
#if __CUDA_ARCH__ >= 900
    if (Cluster::size() > 1) Cluster::wait();
#endif
  }

  // Gather `each` words of every warp, in order of warps: a warp's i-th word is that of lane i * 32 / each. `each` is a
  // power of two, at most 32, and the words fit a buffer.
  __device__ __forceinline__ const uint64_t* all_gather(uint64_t mine, int each = 1) {
    return exchange(mine, each, true);
  }
  // Gather to the first warp of each block only. A block barrier must come before others read them or send more.
  __device__ __forceinline__ const uint64_t* gather_to_first_warp(uint64_t mine) {
    return exchange(mine, 1, warp_id() == 0);
  }

  // Gather one word of every block, in order of blocks, known to all of its threads. A block barrier must have come
  // after the last words were read.
  __device__ __forceinline__ const uint64_t* gather_blocks(uint64_t mine) {
    uint64_t* words = s_.words[turn_ ^= 1];
#if __CUDA_ARCH__ >= 900
    if (Cluster::size() > 1) {
      Mbarrier& barrier = expect_words(static_cast<int>(Cluster::size()));
      if (threadIdx.x < Cluster::size()) send(&words[Cluster::rank()], mine, barrier, threadIdx.x);
      wait_for_words();
      return words;
    }
#endif
    if (threadIdx.x == 0) words[0] = mine;
    __syncthreads();
    return words;
  }

  // Return the sum (below: the maximum) over all threads of the cluster.
  __device__ uint64_t sum(uint64_t mine) {
    const uint64_t* words = all_gather(warp_sum(mine));
    uint64_t total = 0;
    for (int i = lane_id(); i < row_warps(); i += kWarp) total += words[i];
    return warp_sum(total);
  }
  __device__ uint64_t max(uint64_t mine) {
    const uint64_t* words = all_gather(warp_max(mine));
    uint64_t most = 0;
    for (int i = lane_id(); i < row_warps(); i += kWarp) most = ::max(most, words[i]);
    return warp_max(most);
  }

#if __CUDA_ARCH__ >= 900
  // Write to the same address in the block of that rank, and complete the bytes on its mbarrier.
  __device__ static void send(uint64_t* to, uint64_t number, Mbarrier& barrier, unsigned rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(
                     Cluster::address_at(to, rank)),
                 "l"(number), "r"(Cluster::address_at(&barrier, rank))
                 : "memory");
  }
  __device__ static void send(uint4* to, uint4 number, Mbarrier& barrier, unsigned rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            Cluster::address_at(to, rank)),
        "r"(number.x), "r"(number.y), "r"(number.z), "r"(number.w), "r"(Cluster::address_at(&barrier, rank))
        : "memory");
  }
#endif

 private:
  __device__ __forceinline__ const uint64_t* exchange(uint64_t mine, int each, bool waits) {
    uint64_t* words = s_.words[turn_ ^= 1];
    const int apart_log2 = __clz(each) - (31 - 5);  // lanes between words: 32 / each
#if __CUDA_ARCH__ >= 900
    if (Cluster::size() > 1) {
      Mbarrier& barrier = expect_words(row_warps() * each);
      const int messages = each << Cluster::size_log2();
#pragma unroll 1
      for (int first = 0; first < messages; first += kWarp) {
        const int message = first + lane_id(), i = min(message >> Cluster::size_log2(), each - 1);
        const uint64_t number = __shfl_sync(kFullMask, mine, i << apart_log2);
        if (message < messages) send(&words[row_warp() * each + i], number, barrier, message & (Cluster::size() - 1));
      }
      wait_for_words(waits);
      return words;
    }
#endif
    if (lane_id() >> apart_log2 << apart_log2 == lane_id()) words[row_warp() * each + (lane_id() >> apart_log2)] = mine;
    __syncthreads();
    return words;
  }

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ Mbarrier& expect_words(int count) {
    Mbarrier& barrier = s_.barriers[turn_];
    if (threadIdx.x == 0) barrier.arrive_expecting(static_cast<unsigned>(count * sizeof(uint64_t)));
    return barrier;
  }
  __device__ __forceinline__ void wait_for_words(bool waits = true) {
    if (waits) s_.barriers[turn_].wait_for_cluster(phases_ >> turn_ & 1);
    phases_ ^= 1u << turn_;
  }
#endif

  Storage& s_;
  unsigned turn_ = 0, phases_ = 0;
};

// Result of a search in the prefix sums of n words in smem, for the position target_of(sum of all); the same in all
// lanes of a warp.
struct PrefixHit {
  int index;        // word that contains the target; -1: beyond all of them
  uint64_t before;  // sum of the words before that one
  uint64_t target, total;
};
template <class TargetOf>
__device__ PrefixHit find_in_prefix_sums(const uint64_t* words, int n, TargetOf&& target_of) {
  const int few = (n + kWarp - 1) / kWarp, first = lane_id() * few;  // each lane sums a few
  uint64_t mine = 0;
  for (int i = first; i < min(first + few, n); ++i) mine += words[i];
  const uint64_t through = sum_up_to_lane(mine);
  const uint64_t total = __shfl_sync(kFullMask, through, kWarp - 1), target = target_of(total);
  const unsigned past = __ballot_sync(kFullMask, target < through);
  if (past == 0) return {-1, 0, target, total};
  const int lane = __ffs(static_cast<int>(past)) - 1;
  uint64_t before = __shfl_sync(kFullMask, through - mine, lane);
  int index = lane * few;
  while (index + 1 < n && target >= before + words[index]) before += words[index++];
  return {index, before, target, total};
}

// Pack a lane's largest logit and the lowest id that has it. A larger word is better; 0 means nothing above -inf.
// `held` must be unchanged since the row's begin().
template <bool kAdjusted, class Row>
__device__ __forceinline__ uint64_t lane_entry(const Row& row, typename Row::Held& held) {
  int tile;
  const float best = row.template largest<kAdjusted>(held, tile);
  uint64_t mine = 0;
  if (best > -INFINITY) {
    float x[Row::kItems];
    row.template items<kAdjusted>(tile, row.read(tile, held), x);
    int id = 0;
#pragma unroll
    for (int i = Row::kItems - 1; i >= 0; --i)
      if (x[i] == best) id = row.id_of(tile) + i;
    mine = static_cast<uint64_t>(order_key(best)) << 32 | ~static_cast<uint32_t>(id);
  }
  return mine;
}
__device__ __forceinline__ int32_t entry_id(uint64_t entry) {
  return entry == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(entry));
}

// Return the lowest id with the largest logit, or -1 if nothing is above -inf; valid in the first warp of each block
// only. `held` must be unchanged since the row's begin(). A block barrier must come before the next row.
template <class T, bool kAdjusted>
__device__ int32_t largest_id(const TiledRow<T>& row, typename TiledRow<T>::Held& held, Exchange& exchange) {
  const uint64_t* words = exchange.gather_to_first_warp(warp_max(lane_entry<kAdjusted>(row, held)));
  if (warp_id() != 0) return -1;
  uint64_t winner = 0;
  for (int i = lane_id(); i < row_warps(); i += kWarp) winner = ::max(winner, words[i]);
  return entry_id(warp_max(winner));
}

}  // namespace specdec::verify
