// What the blocks of a cluster have summed of the same rows goes to one of them: block k of n finishes rows k, k + n,
// ... and has the sums of all for them in its shared memory, written there by those who summed. Where clusters share
// the rows, it leaves what these make in the workspace, and the last one to do so writes them: nobody waits. Merged in
// the order of the KV.
#pragma once

#include "attention/merge_parts.cuh"
#include "core/cluster.cuh"
#include "core/mbarrier.cuh"

namespace specdec::few {

template <int D, int kRows>
struct Parts {
  static constexpr int kSlots = kRows == 16 ? 21 : kRows + 6;  // rows that a block finishes, times the blocks: at most
  alignas(16) float out[kSlots][D];                            // not yet divided by the sums of weights
  alignas(8) float2 weights[kSlots];                           // their maximum and sum

  // Of a row that this block has summed, in the block that finishes it.
  struct Place {
    unsigned rank;
    int slot;
  };
  __device__ static Place place_of(int row) {
    const unsigned size = Cluster::size();
    return {row % size, static_cast<int>(row / size * size + Cluster::rank())};
  }
  // Stores count themselves in at the barrier `there` of the block that they go to.
  __device__ void put(Place to, int column, float4 x, const Mbarrier& there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     Cluster::address_at(&out[to.slot][column], to.rank)),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(Cluster::address_at(&there, to.rank))
                 : "memory");
  }
  __device__ void put(Place to, float top, float total, const Mbarrier& there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     Cluster::address_at(&weights[to.slot], to.rank)),
                 "f"(top), "f"(total), "r"(Cluster::address_at(&there, to.rank))
                 : "memory");
  }
  // That come to this block, of `count` rows.
  __device__ static unsigned bytes(int count) {
    const int size = static_cast<int>(Cluster::size()), behind = count - static_cast<int>(Cluster::rank());
    return behind <= 0
               ? 0
               : static_cast<unsigned>((behind + size - 1) / size * size) * (sizeof(float) * D + sizeof(float2));
  }

  // Writes what this block finishes of the rows from s.first_row on, of which `valid` are valid: zeros for the others.
  template <class T, int kWarps, bool kMayShare>
  __device__ void finish(const TreeAttentionParams& p, const Cut& cut, const Segment& s) const {
    const int lane = threadIdx.x % kWarp, size = static_cast<int>(Cluster::size());
    const int valid = s.request.valid_rows * cut.group.divisor - s.first_row;
    const int end = min(kRows, s.request.rows * cut.group.divisor - s.first_row);
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
      if constexpr (kMayShare)
        if (s.parts > 1 && row < valid && !is_last(p, cut, s, row, total)) continue;
      if (!kMayShare || row < valid || s.part == s.first_part)
        write_row<T>(p, cut, s.request, s.head, s.first_row + row, total);
    }
  }

 private:
  // Where clusters share the tile: leaves what this one has summed of a row. The last one to do so gets the sum of all.
  __device__ static bool is_last(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int row,
                                 RowSum<D>& sum) {
    const int tile = s.first_row / kRows;
    sum.store(part_of(p, cut, s.part, tile, D), kRows, row);
    __syncwarp();
    bool last = false;
    if (threadIdx.x % kWarp == 0) last = PartsCounter(p, cut, s, tile, D, row).arrive_last();
    if (!__any_sync(kFullMask, last)) return false;
    __syncwarp();
    RowSum<D> all;
#pragma unroll 1
    for (int part = s.first_part; part < s.first_part + s.parts; ++part) {
      RowSum<D> some = sum;
      if (part != s.part) some.load(part_of(p, cut, part, tile, D), kRows, row);
      all.add(some);
    }
    sum = all;
    return true;
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
