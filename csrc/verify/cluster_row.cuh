// A row of logits read by all blocks of a cluster, and what its warps tell each other about it.
#pragma once

#include "core/cluster.cuh"
#include "verify/logit_row.h"

namespace specdec {

constexpr int kRowThreads = 512, kRowWarps = kRowThreads / kWarp;

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarp; }
__device__ __forceinline__ int row_warps() { return kRowWarps * static_cast<int>(Cluster::size()); }
__device__ __forceinline__ int row_warp() { return kRowWarps * static_cast<int>(Cluster::rank()) + warp_id(); }

// A row in tiles of 512 bytes, one vector of 16 a lane. Each warp of the cluster has a stretch of consecutive tiles, so
// that sums in order of ids need only the stretches' totals. Rows may start at any element.
template <class T>
class TiledRow {
 public:
  static constexpr int kItems = sizeof(uint4) / sizeof(T);
  static constexpr int kTile = kItems * kWarp;

  __device__ TiledRow(const LogitRow<T>& row, int64_t vocab)
      : row_(row),
        vocab_(static_cast<int>(vocab)),
        skipped_(static_cast<int>(reinterpret_cast<uintptr_t>(row.logits) % sizeof(uint4) / sizeof(T))) {
    const int tiles = (vocab_ + skipped_ + kTile - 1) / kTile;  // place p of the vectors' grid holds id p - skipped_
    stretch_ = (tiles + row_warps() - 1) >> (Cluster::size_log2() + 4);
    static_assert(kRowWarps == 16);
    first_ = min(row_warp() * stretch_, tiles);
    end_ = min(first_ + stretch_, tiles);
  }

  // Calls f(tile, raw) for the tiles of this warp's stretch, in order, all lanes together; items() and largest_of()
  // read raw. Four loads are in flight, but f stands in the code once: a kernel this short waits for its instructions
  // as much as for memory.
  template <class F>
  __device__ __forceinline__ void each(F&& f) const {
    constexpr int kLoads = 4;
    for (int first = first_; first < end_; first += kLoads) {
      uint4 raw[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        if (first + j < end_) raw[j] = load(id_of(first + j));
      const int end = min(first + kLoads, end_);
#pragma unroll 1
      for (int tile = first; tile < end; ++tile) {
        f(tile, raw[0]);
#pragma unroll
        for (int j = 0; j + 1 < kLoads; ++j) raw[j] = raw[j + 1];
      }
    }
  }

  // This lane's part of a tile: the ids from id_of(tile) on, -inf where there is no such id.
  __device__ uint4 read(int tile) const { return load(id_of(tile)); }
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

  // The tiles of the stretch of one of the cluster's warps: from first_of(warp) to, not including, first_of(warp + 1).
  __device__ int first_of(int row_warp) const {
    return min(row_warp * stretch_, (vocab_ + skipped_ + kTile - 1) / kTile);
  }

  // The lane's largest logit and the first of its tiles that holds it. The first read of a row, and so unrolled.
  template <bool kAdjusted>
  __device__ float largest(int& its_tile) const {
    constexpr int kLoads = 8;
    float best = -INFINITY;
    its_tile = first_;
    for (int first = first_; first < end_; first += kLoads) {
      uint4 raw[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        if (first + j < end_) raw[j] = load(id_of(first + j));
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (first + j >= end_) break;
        const float most = largest_of<kAdjusted>(first + j, raw[j]);
        if (most > best) {
          best = most;
          its_tile = first + j;
        }
      }
    }
    return best;
  }

 private:
  __device__ __forceinline__ uint4 load(int id) const {
    if (id >= 0 && id + kItems <= vocab_) return *reinterpret_cast<const uint4*>(row_.logits + id);
    uint4 raw;
    T* items = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      items[i] = id + i >= 0 && id + i < vocab_ ? row_.logits[id + i] : from_float<T>(-INFINITY);
    return raw;
  }

  // Two at a time; NaN loses, as in fmaxf.
  template <class Pair>
  __device__ __forceinline__ static float largest_pair(const uint4& raw) {
    const Pair* pairs = reinterpret_cast<const Pair*>(&raw);
    const Pair most = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(__low2float(most), __high2float(most));
  }

  LogitRow<T> row_;
  int vocab_, skipped_, stretch_, first_, end_;
};

// Sums over a warp, for all its lanes.
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
  constexpr uint32_t kLow = (1u << 22) - 1;  // 32 numbers of 22 bits fit a word
  const uint64_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x) & kLow);
  const uint64_t middle = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 22) & kLow);
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 44));
  return low + (middle << 22) + (high << 44);
}
__device__ __forceinline__ uint64_t warp_inclusive_sum(uint64_t x) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const uint64_t before = __shfl_up_sync(kFullMask, x, d);
    if (lane_id() >= d) x += before;
  }
  return x;
}
__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
  const uint32_t high = __reduce_max_sync(kFullMask, static_cast<uint32_t>(x >> 32));
  const uint32_t low = __reduce_max_sync(kFullMask, x >> 32 == high ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

// Numbers from every warp of the cluster to all of them. A block of Hopper sends them into its neighbours' shared
// memory and they count themselves in at a barrier there (st.async): no fence, no barrier of the whole cluster. Two
// buffers take turns: whoever writes one again has heard from every warp that it is done with it.
class Exchange {
 public:
  static constexpr int kWords = 512;
  struct Storage {  // in shared memory
    alignas(16) uint64_t words[2][kWords];
    uint64_t barriers[2];
  };

  // Before a number can be sent every block must have begun: they say so here, and wait for it at the first sending.
  __device__ explicit Exchange(Storage& storage) : s_(storage) {
#if __CUDA_ARCH__ >= 900
    if (Cluster::size() == 1) return;
    if (threadIdx.x == 0) {
      init_barrier(s_.barriers[0]);
      init_barrier(s_.barriers[1]);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Cluster::arrive();
#endif
  }

  // `each` numbers of every warp, in order of warps: the warp's i-th is that of lane i * 32 / each. `each` is a power
  // of two, at most 32, and the numbers fit a buffer.
  __device__ __forceinline__ const uint64_t* all(uint64_t mine, int each = 1) {
    turn_ ^= 1;
    uint64_t* numbers = s_.words[turn_];
    const int apart_log2 = __clz(each) - (31 - 5);  // lanes between numbers: 32 / each
#if __CUDA_ARCH__ >= 900
    if (Cluster::size() > 1) {
      if (!joined_) Cluster::wait();
      joined_ = true;
      uint64_t& barrier = s_.barriers[turn_];
      if (threadIdx.x == 0) expect_bytes(barrier, row_warps() * each * static_cast<int>(sizeof(uint64_t)));
      const int messages = each << Cluster::size_log2();
#pragma unroll 1
      for (int first = 0; first < messages; first += kWarp) {
        const int message = first + lane_id(), i = min(message >> Cluster::size_log2(), each - 1);
        const uint64_t number = __shfl_sync(kFullMask, mine, i << apart_log2);
        if (message < messages) send(&numbers[row_warp() * each + i], number, barrier, message & (Cluster::size() - 1));
      }
      wait(barrier, phases_ >> turn_ & 1);
      phases_ ^= 1u << turn_;
      return numbers;
    }
#endif
    if (lane_id() >> apart_log2 << apart_log2 == lane_id())
      numbers[row_warp() * each + (lane_id() >> apart_log2)] = mine;
    __syncthreads();
    return numbers;
  }

  // Over all threads of the cluster.
  __device__ uint64_t sum(uint64_t mine) {
    const uint64_t* numbers = all(warp_sum(mine));
    uint64_t total = 0;
    for (int i = lane_id(); i < row_warps(); i += kWarp) total += numbers[i];
    return warp_sum(total);
  }
  __device__ uint64_t max(uint64_t mine) {
    const uint64_t* numbers = all(warp_max(mine));
    uint64_t most = 0;
    for (int i = lane_id(); i < row_warps(); i += kWarp) most = ::max(most, numbers[i]);
    return warp_max(most);
  }

#if __CUDA_ARCH__ >= 900
  __device__ static void init_barrier(uint64_t& barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&barrier)) : "memory");
  }
  __device__ static void expect_bytes(uint64_t& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes)
                 : "memory");
  }
  __device__ static void wait(uint64_t& barrier, unsigned phase) {
    unsigned done = 0;
    while (!done)
      asm volatile(
          "{ .reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done; }"
          : "=r"(done)
          : "r"(address(&barrier)), "r"(phase)
          : "memory");
  }
  // Writes to the same places of the block of that rank, and counts the bytes in at its barrier.
  __device__ static void send(uint64_t* to, uint64_t number, uint64_t& barrier, unsigned rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(remote(to, rank)),
        "l"(number), "r"(remote(&barrier, rank))
        : "memory");
  }
  __device__ static void send(uint4* to, uint4 number, uint64_t& barrier, unsigned rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            remote(to, rank)),
        "r"(number.x), "r"(number.y), "r"(number.z), "r"(number.w), "r"(remote(&barrier, rank))
        : "memory");
  }
#endif

 private:
#if __CUDA_ARCH__ >= 900
  __device__ static uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
  __device__ static uint32_t remote(const void* shared, unsigned rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(shared)), "r"(rank));
    return there;
  }
#endif

  Storage& s_;
  unsigned turn_ = 0, phases_ = 0;
  bool joined_ = false;
};

// The lowest id with the largest logit, or -1 where nothing is above -inf.
template <class T, bool kAdjusted>
__device__ int32_t largest_id(const TiledRow<T>& row, Exchange& exchange) {
  int tile;
  const float best = row.template largest<kAdjusted>(tile);
  uint64_t mine = 0;
  if (best > -INFINITY) {
    float x[TiledRow<T>::kItems];
    row.template items<kAdjusted>(tile, row.read(tile), x);
    int id = 0;
#pragma unroll
    for (int i = TiledRow<T>::kItems - 1; i >= 0; --i)
      if (x[i] == best) id = row.id_of(tile) + i;
    mine = static_cast<uint64_t>(order_key(best)) << 32 | ~static_cast<uint32_t>(id);
  }
  const uint64_t winner = exchange.max(mine);
  return winner == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(winner));
}

}  // namespace specdec
