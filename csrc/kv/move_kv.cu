// One thread owns a column of up to 16 bytes of a layer's K and V rows and walks the path upwards; blockIdx is
// (request, layer, stretch of columns). A chain moves nothing. Reads and writes 2 * layers * heads * head_bytes a moved
// row each.
#include <cutlass/fast_math.h>

#include "core/cuda.cuh"
#include "kv/bytes.h"
#include "kv/move_kv.h"

namespace specdec {
namespace {

constexpr int kThreads = 128;

template <class Unit>
__device__ __forceinline__ void move_unit(const PoolView& pool, int64_t column, const KvRow& from, const KvRow& to) {
  *reinterpret_cast<Unit*>(row_data(pool, to) + column) = *reinterpret_cast<const Unit*>(row_data(pool, from) + column);
}

template <class Unit>
__global__ void __launch_bounds__(kThreads)
    move_kv_kernel(MoveKvParams p, cutlass::FastDivmod page_size, cutlass::FastDivmod units_per_head, int units) {
  const int64_t b = blockIdx.x, layer = blockIdx.y;
  const int i = static_cast<int>(blockIdx.z) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= units) return;
  int head, unit;
  units_per_head(head, unit, i);
  const int64_t byte = static_cast<int64_t>(unit) * static_cast<int64_t>(sizeof(Unit));
  const int64_t k_column = layer * p.k_layer_stride + head * p.k_pools.head_stride + byte;
  const int64_t v_column = layer * p.v_layer_stride + head * p.v_pools.head_stride + byte;

  RowMoves<cutlass::FastDivmod> moves(p, page_size, b);
  while (moves.next()) {
    move_unit<Unit>(p.k_pools, k_column, moves.from, moves.to);
    move_unit<Unit>(p.v_pools, v_column, moves.from, moves.to);
  }
  if (moves.bits && layer == 0 && i == 0) set_status(p.status, moves.slot, moves.bits);
}

}  // namespace

void move_kv_cuda(const MoveKvParams& p, Stream stream) {
  const int64_t units_per_head = p.head_bytes / p.unit;
  const int64_t units = units_per_head * p.heads;
  const dim3 grid(grid_x("move_kv", p.batch), static_cast<unsigned>(p.layers),
                  static_cast<unsigned>((units + kThreads - 1) / kThreads));
  with_copy_unit(p.unit, [&]<class Unit>() {
    move_kv_kernel<Unit><<<grid, kThreads, 0, stream>>>(p, cutlass::FastDivmod(static_cast<int>(p.rows.page_size)),
                                                        cutlass::FastDivmod(static_cast<int>(units_per_head)),
                                                        static_cast<int>(units));
  });
  SD_LAUNCH_CHECK("move_kv");
}

}  // namespace specdec
