// Merging inside a cluster: what its blocks have summed of a row goes to one of them. Block k of n finishes rows k, k +
// n, ..., and receives everybody's sums of them in its shared memory. Where clusters share the row tile, it leaves the
// merged sum in the workspace, and the last cluster to do so writes the row: nobody waits. Partial results are merged
// in the order of the KV.
#pragma once

#include "attention/common/merge.cuh"
#include "core/cluster.cuh"
#include "core/mbarrier.cuh"

namespace specdec::attention {

template <int D, int kRows>
struct ClusterPartials {
  static constexpr int kSlots =
      kRows == 16 ? 21 : kRows + 6;   // rows that a block finishes, times the blocks of a cluster: at most
  alignas(16) float out[kSlots][D];   // not yet divided by the sums of weights
  alignas(8) float2 weights[kSlots];  // their maxima and sums of weights

  // Where this block's sum of a row goes: to the block that finishes the row.
  struct Destination {
    unsigned rank;
    int slot;
  };
  __device__ static Destination destination_of(int row) {
    const unsigned size = Cluster::size();
    return {row % size, static_cast<int>(row / size * size + Cluster::rank())};
  }
  // Sends some columns. The stores count themselves in at the barrier `arrived` of the block they go to.
  __device__ void send(Destination to, int column, float4 x, const Mbarrier& arrived) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     Cluster::address_at(&out[to.slot][column], to.rank)),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(Cluster::address_at(&arrived, to.rank))
                 : "memory");
  }
  __device__ void send(Destination to, float top, float total, const Mbarrier& arrived) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     Cluster::address_at(&weights[to.slot], to.rank)),
                 "f"(top), "f"(total), "r"(Cluster::address_at(&arrived, to.rank))
                 : "memory");
  }
  // The bytes that come to this block for `count` rows.
  __device__ static unsigned bytes(int count) {
    const int size = static_cast<int>(Cluster::size()), behind = count - static_cast<int>(Cluster::rank());
    return behind <= 0
               ? 0
               : static_cast<unsigned>((behind + size - 1) / size * size) * (sizeof(float) * D + sizeof(float2));
  }

  // Writes the rows from s.first_row on that this block finishes, and zeros for those behind the valid ones.
  template <class T, int kWarps, bool kSharing>
  __device__ void finish(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s) const {
    const int lane = threadIdx.x % kWarp, size = static_cast<int>(Cluster::size());
    const int valid = s.request.valid_rows * plan.gqa_group.divisor - s.first_row;
    const int end = min(kRows, s.request.rows * plan.gqa_group.divisor - s.first_row);
    int slot = static_cast<int>(threadIdx.x) / kWarp * size;
#pragma unroll 1
    for (int row = static_cast<int>(Cluster::rank()) + slot; row < end; row += kWarps * size, slot += kWarps * size) {
      RowSum<D> total;
      if (row < valid) {
        float2 part{-INFINITY, 0};
        if (lane < size) part = weights[slot + lane];
        const float top = part.x;
        total.top = top;
#pragma unroll
        for (int step = kMaxCluster / 2; step > 0; step /= 2)
          total.top = fmaxf(total.top, __shfl_xor_sync(kFullMask, total.top, step));
        const float origin = __shfl_sync(kFullMask, total.top, 0);
        const float weight = origin == -INFINITY ? 0 : exp2_fast(top - origin);
        total.top = origin;
        const float mine = weight * part.y;
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
      if constexpr (kSharing)
        if (s.splits > 1 && row < valid && !is_last(p, plan, s, row, total)) continue;
      if (!kSharing || row < valid || s.partial == s.first_partial)
        write_row<T>(p, plan, s.request, s.kv_head, s.first_row + row, total);
    }
  }

 private:
  // Where clusters share the row tile: leaves what this one has summed of a row. Returns whether it is the last one to
  // do so, which gets the sum of all.
  __device__ static bool is_last(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s, int row,
                                 RowSum<D>& sum) {
    const int tile = s.first_row / kRows;
    sum.store(partial_of(p, plan, s.partial, tile, D), kRows, row);
    __syncwarp();
    bool last = false;
    if (threadIdx.x % kWarp == 0) last = PartialsCounter(p, plan, s, tile, D, row).arrive_last();
    if (!__any_sync(kFullMask, last)) return false;
    __syncwarp();
    RowSum<D> all;
#pragma unroll 1
    for (int number = s.first_partial; number < s.first_partial + s.splits; ++number) {
      RowSum<D> some = sum;
      if (number != s.partial) some.load(partial_of(p, plan, number, tile, D), kRows, row);
      all.add(some);
    }
    sum = all;
    return true;
  }
};

}  // namespace specdec::attention
