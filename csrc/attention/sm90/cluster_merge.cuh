// Reduction within a cluster: blocks send their partial results of a row to one of them through distributed shared
// memory.
//
// Block k of n finishes rows k, k + n, ... and receives every block's partial results of them in its shared memory. If
// clusters share the row tile, the block stores the merged result in the workspace, and the last cluster to do so
// writes the row: nobody waits. Partial results are merged in KV order.
#pragma once

#include "attention/common/merge.cuh"
#include "core/cluster.cuh"
#include "core/mbarrier.cuh"

namespace specdec::attention {

template <int D, int kRows>
struct ClusterPartials {
  // Max rows that a block finishes, times the blocks of a cluster.
  static constexpr int kSlots = kRows == 16 ? 21 : kRows + 6;
  alignas(16) float out[kSlots][D];   // unnormalized outputs: not yet divided by the sums of weights
  alignas(8) float2 weights[kSlots];  // (maximum, sum of weights)

  // Where this block's partial result of a row goes: the rank of the block that finishes the row, and the slot there.
  struct Destination {
    unsigned rank;
    int slot;
  };
  __device__ static Destination destination_of(int row) {
    const unsigned size = Cluster::size();
    return {row % size, static_cast<int>(row / size * size + Cluster::rank())};
  }
  // Send four columns. The stores complete as transaction bytes on the barrier `arrived` of the destination block.
  __device__ void send(Destination to, int column, float4 x, const Mbarrier& arrived) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     Cluster::address_at(&out[to.slot][column], to.rank)),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(Cluster::address_at(&arrived, to.rank))
                 : "memory");
  }
  __device__ void send(Destination to, float row_max, float row_sum, const Mbarrier& arrived) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     Cluster::address_at(&weights[to.slot], to.rank)),
                 "f"(row_max), "f"(row_sum), "r"(Cluster::address_at(&arrived, to.rank))
                 : "memory");
  }
  // Return the bytes that this block receives for `count` rows.
  __device__ static unsigned bytes(int count) {
    const int size = static_cast<int>(Cluster::size()), remaining = count - static_cast<int>(Cluster::rank());
    return remaining <= 0
               ? 0
               : static_cast<unsigned>((remaining + size - 1) / size * size) * (sizeof(float) * D + sizeof(float2));
  }

  // Write the rows from s.first_row on that this block finishes, with zeros for those past the valid ones.
  template <class T, int kWarps, bool kSharing>
  __device__ void finish(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s) const {
    const int lane = threadIdx.x % kWarp, size = static_cast<int>(Cluster::size());
    const int valid = s.request.valid_rows * plan.gqa_group.divisor - s.first_row;
    const int end = min(kRows, s.request.rows * plan.gqa_group.divisor - s.first_row);
    int slot = static_cast<int>(threadIdx.x) / kWarp * size;
#pragma unroll 1
    for (int row = static_cast<int>(Cluster::rank()) + slot; row < end; row += kWarps * size, slot += kWarps * size) {
      PartialRow<D> sum;
      if (row < valid) {
        float2 part{-INFINITY, 0};
        if (lane < size) part = weights[slot + lane];
        const float row_max = part.x;
        sum.row_max = row_max;
#pragma unroll
        for (int step = kMaxCluster / 2; step > 0; step /= 2)
          sum.row_max = fmaxf(sum.row_max, __shfl_xor_sync(kFullMask, sum.row_max, step));
        const float origin = __shfl_sync(kFullMask, sum.row_max, 0);
        const float weight = origin == -INFINITY ? 0 : exp2_fast(row_max - origin);
        sum.row_max = origin;
        const float mine = weight * part.y;
        sum.row_sum = mine;
#pragma unroll
        for (int step = kMaxCluster / 2; step > 0; step /= 2)
          sum.row_sum += __shfl_xor_sync(kFullMask, sum.row_sum, step);
        sum.row_sum = __shfl_sync(kFullMask, sum.row_sum, 0);
#pragma unroll
        for (int k = 0; k < static_cast<int>(kMaxCluster); ++k) {
          const float factor = __shfl_sync(kFullMask, weight, k);
#pragma unroll
          for (int v = 0; v < PartialRow<D>::kVectors; ++v) {
            float4 x{}, &to = sum.x[v];
            if (k < size && PartialRow<D>::has_columns())
              x = *reinterpret_cast<const float4*>(&out[slot + k][4 * lane + 128 * v]);
            to.x += factor * x.x, to.y += factor * x.y, to.z += factor * x.z, to.w += factor * x.w;
          }
        }
      }
      if constexpr (kSharing)
        if (s.splits > 1 && row < valid && !store_and_check_last(p, plan, s, row, sum)) continue;
      if (!kSharing || row < valid || s.partial == s.first_partial)
        write_row<T>(p, plan, s.request, s.kv_head, s.first_row + row, sum);
    }
  }

 private:
  // Store this cluster's partial result of a row, where clusters share the row tile. Return whether it is the last
  // cluster to do so; then `sum` becomes the merged result of all of them.
  __device__ static bool store_and_check_last(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                              int row, PartialRow<D>& sum) {
    const int tile = s.first_row / kRows;
    sum.store(partial_of(p, plan, s.partial, tile, D), kRows, row);
    __syncwarp();
    bool last = false;
    if (threadIdx.x % kWarp == 0) last = PartialsCounter(p, plan, s, tile, D, row).arrive_and_check_last();
    if (!__any_sync(kFullMask, last)) return false;
    __syncwarp();
    PartialRow<D> all;
#pragma unroll 1
    for (int number = s.first_partial; number < s.first_partial + s.splits; ++number) {
      PartialRow<D> some = sum;
      if (number != s.partial) some.load(partial_of(p, plan, number, tile, D), kRows, row);
      all.add(some);
    }
    sum = all;
    return true;
  }
};

}  // namespace specdec::attention
