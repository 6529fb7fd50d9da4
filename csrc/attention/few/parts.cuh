// What the blocks of a cluster have summed of the same 16 or 64 rows goes to one of them: block k of n finishes rows k,
// k + n, ... and has the sums of all for them in its shared memory, written there by those who summed. Merged in the
// order of the KV.
#pragma once

#include "attention/merge_parts.cuh"
#include "core/cluster.cuh"

namespace specdec::few {

template <int D, int kRows>
struct Parts {
  static constexpr int kSlots = kRows == 16 ? 21 : 70;  // rows that a block finishes, times the blocks: at most
  alignas(16) float out[kSlots][D];                     // not yet divided by the sums of weights
  float max[kSlots], sum[kSlots];

  // Of a row that this block has summed, in the block that finishes it.
  struct Place {
    unsigned rank;
    int slot;
  };
  __device__ static Place place_of(int row) {
    const unsigned size = Cluster::size();
    return {row % size, static_cast<int>(row / size * size + Cluster::rank())};
  }
  __device__ void put(Place to, int column, float4 x) {
    *reinterpret_cast<float4*>(Cluster::at(&out[to.slot][column], to.rank)) = x;
  }
  __device__ void put(Place to, float top, float total) {
    *Cluster::at(&max[to.slot], to.rank) = top;
    *Cluster::at(&sum[to.slot], to.rank) = total;
  }

  // Writes what this block finishes of the rows from s.first_row on, of which `valid` are valid: zeros for the others.
  template <class T, int kWarps>
  __device__ void finish(const TreeAttentionParams& p, const Cut& cut, const Segment& s) const {
    const int lane = threadIdx.x % kWarp, size = static_cast<int>(Cluster::size());
    const int valid = s.request.valid_rows * cut.group.divisor - s.first_row;
    const int end = min(kRows, s.request.rows * cut.group.divisor - s.first_row);
    int slot = static_cast<int>(threadIdx.x) / kWarp * size;
#pragma unroll 1
    for (int row = static_cast<int>(Cluster::rank()) + slot; row < end; row += kWarps * size, slot += kWarps * size) {
      RowSum<D> total;
      if (row < valid) {
        float top = -INFINITY;
        if (lane < size) top = max[slot + lane];
        total.top = top;
#pragma unroll
        for (int step = kMaxCluster / 2; step > 0; step /= 2)
          total.top = fmaxf(total.top, __shfl_xor_sync(kFullMask, total.top, step));
        const float origin = __shfl_sync(kFullMask, total.top, 0);
        const float weight = origin == -INFINITY ? 0 : exp2_fast(top - origin);
        total.top = origin;
        const float mine = lane < size ? weight * sum[slot + lane] : 0;
        total.total = mine;
#pragma unroll
        for (int step = kMaxCluster / 2; step > 0; step /= 2)
          total.total += __shfl_xor_sync(kFullMask, total.total, step);
        total.total = __shfl_sync(kFullMask, total.total, 0);
        float4& to = total.x[0];
#pragma unroll
        for (int k = 0; k < static_cast<int>(kMaxCluster); ++k) {
          float4 x{};
          if (k < size && RowSum<D>::has_columns()) x = *reinterpret_cast<const float4*>(&out[slot + k][4 * lane]);
          const float factor = __shfl_sync(kFullMask, weight, k);
          to.x += factor * x.x, to.y += factor * x.y, to.z += factor * x.z, to.w += factor * x.w;
        }
      }
      write_row<T>(p, cut, s.request, s.head, s.first_row + row, total);
    }
  }
};

// Packed: the rows behind the last request, which give zeros, dealt out among all blocks of the call.
template <class T, int D, int kWarps>
__device__ void write_rows_behind(const TreeAttentionParams& p, const Cut& cut) {
  const Request r = request_of(p, p.batch);
  const int count = r.rows * cut.group.divisor;
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  for (int64_t n = int64_t{block} * kWarps + threadIdx.x / kWarp; n < count * p.kv_heads; n += int64_t{blocks} * kWarps)
    write_row<T>(p, cut, r, static_cast<int>(n / count), static_cast<int>(n % count), RowSum<D>());
}

}  // namespace specdec::few
