// One warp a row, copying K and V in units of up to 16 bytes; blockIdx.x is the request. Reads and writes
// 2 * heads * head_bytes a valid row each.
#include <cutlass/fast_math.h>

#include <algorithm>

#include "core/cuda.cuh"
#include "kv/bytes.h"
#include "kv/write_kv.h"

namespace specdec {
namespace {

constexpr int kWarps = 4;          // rows a block writes at a time
constexpr int64_t kBlocks = 8192;  // of the whole grid, about; more rows are walked

template <class Unit>
__device__ void copy_row(char* to, int64_t to_head_stride, const char* from, int64_t from_head_stride, int units,
                         const cutlass::FastDivmod& units_per_head) {
  for (int i = threadIdx.x; i < units; i += kWarp) {
    int head, unit;
    units_per_head(head, unit, i);
    reinterpret_cast<Unit*>(to + head * to_head_stride)[unit] =
        reinterpret_cast<const Unit*>(from + head * from_head_stride)[unit];
  }
}

template <class Unit>
__global__ void __launch_bounds__(kWarp* kWarps)
    write_kv_kernel(WriteKvParams p, cutlass::FastDivmod page_size, cutlass::FastDivmod units_per_head, int units) {
  const int64_t b = blockIdx.x;
  const RowsToWrite r = rows_to_write(p, b);
  if (r.bits && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0) set_status(p.status, r.slot, r.bits);

  for (int64_t j = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.y; j < r.count;
       j += static_cast<int64_t>(gridDim.y) * kWarps) {
    const KvRow to = find_own_row(p.rows, page_size, r.slot, p.start_lens[r.slot] + p.row_offset + j);
    if (to.bits) {
      if (threadIdx.x == 0) set_status(p.status, r.slot, to.bits);
      continue;
    }
    copy_row<Unit>(row_data(p.k_pool, to), p.k_pool.head_stride, row_data(p.k, b, r.first + j), p.k.head_stride, units,
                   units_per_head);
    copy_row<Unit>(row_data(p.v_pool, to), p.v_pool.head_stride, row_data(p.v, b, r.first + j), p.v.head_stride, units,
                   units_per_head);
  }
}

}  // namespace

void write_kv_cuda(const WriteKvParams& p, Stream stream) {
  const int64_t units_per_head = p.head_bytes / p.unit;
  const int64_t row_blocks = (p.q_len + kWarps - 1) / kWarps;
  const int64_t blocks_y = std::max<int64_t>(1, std::min({row_blocks, kBlocks / p.batch, kMaxGridY}));
  const dim3 grid(grid_x("write_kv", p.batch), static_cast<unsigned>(blocks_y));
  with_copy_unit(p.unit, [&]<class Unit>() {
    write_kv_kernel<Unit><<<grid, dim3(kWarp, kWarps), 0, stream>>>(
        p, cutlass::FastDivmod(static_cast<int>(p.rows.page_size)),
        cutlass::FastDivmod(static_cast<int>(units_per_head)), static_cast<int>(units_per_head * p.heads));
  });
  SD_LAUNCH_CHECK("write_kv");
}

}  // namespace specdec
