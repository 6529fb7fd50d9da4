// A row of logits read by all blocks of a cluster, and what its warps tell each other about it.
#pragma once

#include "core/cluster.cuh"
#include "verify/logit_row.h"

namespace specdec {

constexpr int kRowThreads = 512, kRowWarps = kRowThreads / kWarp;
constexpr int kMaxRowWarps = kRowWarps * kMaxCluster;

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarp; }
__device__ __forceinline__ int row_warps() { return kRowWarps * static_cast<int>(Cluster::size()); }
__device__ __forceinline__ int row_warp() { return kRowWarps * static_cast<int>(Cluster::rank()) + warp_id(); }

// This warp's stretch of a row: consecutive ids, in vectors of 16 bytes, so that sums in order of ids need only the
// stretches' totals. Rows may start at any element.
template <class T>
class RowStretch {
 public:
  static constexpr int kItems = sizeof(uint4) / sizeof(T);
  static constexpr int kTile = kItems * kWarp;  // ids a warp reads at once

  __device__ RowStretch(const LogitRow<T>& row, int64_t vocab)
      : row_(row),
        vocab_(static_cast<int>(vocab)),
        skipped_(static_cast<int>(reinterpret_cast<uintptr_t>(row.logits) % sizeof(uint4) / sizeof(T))) {
    const int places = vocab_ + skipped_;  // place p of the vectors' grid holds id p - skipped_
    const int tiles = (places + kTile - 1) / kTile;
    const int mine = (tiles + row_warps() - 1) / row_warps();
    first_tile_ = row_warp() * mine;
    last_tile_ = min(first_tile_ + mine, tiles);
  }

  // Calls f(id, x) for every vector of the stretch, all lanes together: x[i] is the logit of id + i, -inf where there
  // is no such id. Ids rise with the lane and from call to call. f returns nothing, or false to end.
  template <bool kAdjusted, class F>
  __device__ __forceinline__ void each(F&& f) const {
    constexpr int kUnroll = 4;  // loads in flight
    for (int tile = first_tile_; tile < last_tile_; tile += kUnroll) {
      uint4 raw[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j)
        if (tile + j < last_tile_) raw[j] = load(id_of(tile + j));
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (tile + j >= last_tile_) break;
        const int id = id_of(tile + j);
        const T* items = reinterpret_cast<const T*>(&raw[j]);
        float x[kItems];
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          x[i] = to_float(items[i]);
          if (kAdjusted && id + i >= 0 && id + i < vocab_) x[i] = row_.adjusted(x[i], id + i);
        }
        f(id, x);
      }
    }
  }

 private:
  __device__ int id_of(int tile) const { return tile * kTile + lane_id() * kItems - skipped_; }

  __device__ __forceinline__ uint4 load(int id) const {
    if (id >= 0 && id + kItems <= vocab_) return *reinterpret_cast<const uint4*>(row_.logits + id);
    uint4 raw;
    T* items = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      items[i] = id + i >= 0 && id + i < vocab_ ? row_.logits[id + i] : from_float<T>(-INFINITY);
    return raw;
  }

  LogitRow<T> row_;
  int vocab_, skipped_, first_tile_, last_tile_;
};

// Sums and maxima over a warp, for all its lanes.
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
  constexpr uint32_t kLow = (1u << 22) - 1;  // 32 numbers of 22 bits fit a word
  const uint64_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x) & kLow);
  const uint64_t middle = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 22) & kLow);
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 44));
  return low + (middle << 22) + (high << 44);
}
__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
  const uint32_t high = __reduce_max_sync(kFullMask, static_cast<uint32_t>(x >> 32));
  const uint32_t low = __reduce_max_sync(kFullMask, x >> 32 == high ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}
__device__ __forceinline__ uint64_t warp_inclusive_sum(uint64_t x) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const uint64_t before = __shfl_up_sync(kFullMask, x, d);
    if (lane_id() >= d) x += before;
  }
  return x;
}

// One number from each warp of the cluster to all of them: one barrier a time. Two buffers take turns, so that a block
// may publish again while another still reads.
class Exchange {
 public:
  struct Storage {  // in shared memory
    uint64_t numbers[2][kMaxRowWarps];
  };

  __device__ explicit Exchange(Storage& storage) : storage_(storage) {}

  // The numbers of all warps, in order of ids. `mine` is the same in every lane.
  __device__ const uint64_t* all(uint64_t mine) {
    uint64_t* numbers = storage_.numbers[turn_ ^= 1];
    if (lane_id() < Cluster::size()) Cluster::at(numbers, lane_id())[row_warp()] = mine;
    Cluster::sync();
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
    for (int i = lane_id(); i < row_warps(); i += kWarp) most = most > numbers[i] ? most : numbers[i];
    return warp_max(most);
  }

 private:
  Storage& storage_;
  unsigned turn_ = 0;
};

// The lowest id with the largest logit, or -1 where nothing is above -inf.
template <class T, bool kAdjusted>
__device__ int32_t largest_id(const RowStretch<T>& row, Exchange& exchange) {
  float best = -INFINITY;
  int best_id = -1;
  row.template each<kAdjusted>([&](int id, const auto& x) {
#pragma unroll
    for (int i = 0; i < RowStretch<T>::kItems; ++i) {  // a thread meets its ids in rising order: > keeps the lowest
      if (x[i] > best) {
        best = x[i];
        best_id = id + i;
      }
    }
  });
  const uint64_t mine =
      best_id < 0 ? 0 : static_cast<uint64_t>(order_key(best)) << 32 | ~static_cast<uint32_t>(best_id);
  const uint64_t winner = exchange.max(mine);
  return winner == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(winner));
}

}  // namespace specdec
