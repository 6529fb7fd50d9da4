// Copies of rows within the K and V pools of all layers: a block's first warp finds the rows, then every thread owns
// columns of K and V and copies them for all rows.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>

#include "core/cuda.cuh"
#include "kv/layer_pools.h"

namespace specdec::kv {

// The rows that a block copies, up to 32 at a time. In shared memory.
struct RowCopies {
  int64_t k_from[kWarp], k_to[kWarp], v_from[kWarp], v_to[kWarp];  // bytes from the pool's first row
  int count;

  // Collect the copies of the lanes with `wanted`, in lane order; called by one whole warp.
  __device__ void gather(const LayerPools& pools, bool wanted, KvRow source, KvRow target) {
    const unsigned lane = threadIdx.x % kWarp, all = __ballot_sync(kFullMask, wanted);
    const int at = __popc(all & ((1u << lane) - 1));
    if (wanted) {
      k_from[at] = row_data(pools.k, source) - pools.k.data;
      k_to[at] = row_data(pools.k, target) - pools.k.data;
      v_from[at] = row_data(pools.v, source) - pools.v.data;
      v_to[at] = row_data(pools.v, target) - pools.v.data;
    }
    if (lane == 0) count = __popc(all);
  }
};

// Division of the columns of all layers among blockIdx.y and threads.
struct Columns {
  cutlass::FastDivmod units_per_layer, units_per_head;
  int count, per_block;
};

// Divide the columns for a grid of about `blocks` blocks of `threads` threads.
inline Columns cut_columns(const LayerPools& pools, int64_t batch, int64_t blocks, int64_t threads, unsigned& grid_y) {
  const int64_t per_head = pools.head_bytes / pools.unit, count = pools.layers * pools.heads * per_head;
  const int64_t steps = (count + threads - 1) / threads;  // if one block handled all columns
  const int64_t most = std::max<int64_t>(1, std::min({blocks / batch, steps, kMaxGridY}));
  const int64_t steps_per_block = (steps + most - 1) / most;
  grid_y = static_cast<unsigned>((steps + steps_per_block - 1) / steps_per_block);
  return {cutlass::FastDivmod(static_cast<int>(pools.heads * per_head)),
          cutlass::FastDivmod(static_cast<int>(per_head)), static_cast<int>(count),
          static_cast<int>(steps_per_block * threads)};
}

// Copy the block's columns of all rows in `copies`, kRows rows at a time: all of them are read before any is written,
// so that the reads overlap.
template <class Unit, int kThreads, int kRows>
__device__ __forceinline__ void copy_rows(const LayerPools& pools, const Columns& columns, const RowCopies& copies) {
  const int first = static_cast<int>(blockIdx.y) * columns.per_block;
  const int last = min(columns.count, first + columns.per_block);
  const int count = copies.count;
  if (count == 0) return;
  for (int i = first + static_cast<int>(threadIdx.x); i < last; i += kThreads) {
    int layer, head, unit;
    columns.units_per_layer(layer, unit, i);
    columns.units_per_head(head, unit, unit);
    const int64_t byte = static_cast<int64_t>(unit) * static_cast<int64_t>(sizeof(Unit));
    char* const k = pools.k.data + layer * pools.k_layer_stride + head * pools.k.head_stride + byte;
    char* const v = pools.v.data + layer * pools.v_layer_stride + head * pools.v.head_stride + byte;
    for (int row = 0; row < count; row += kRows) {
      Unit k_units[kRows], v_units[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row + r >= count) break;
        k_units[r] = *reinterpret_cast<const Unit*>(k + copies.k_from[row + r]);
        v_units[r] = *reinterpret_cast<const Unit*>(v + copies.v_from[row + r]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row + r >= count) break;
        *reinterpret_cast<Unit*>(k + copies.k_to[row + r]) = k_units[r];
        *reinterpret_cast<Unit*>(v + copies.v_to[row + r]) = v_units[r];
      }
    }
  }
}

}  // namespace specdec::kv
