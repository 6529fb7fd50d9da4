// Copy KV rows between slots, in every layer.
//
// One block per request (blockIdx.x) and range of columns over all layers (blockIdx.y); a column is 16 bytes of K and
// of V. The block's first warp finds the rows, one lane per row. Reads and writes 2 * layers * heads * head_bytes per
// row.
#include "kv/copy_kv.h"
#include "kv/row_copies.cuh"

namespace specdec::kv {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kBlocks = 2112;  // approximate grid size
constexpr int kRows = 4;           // in flight

template <class Unit>
__global__ void __launch_bounds__(kThreads)
    copy_kv_kernel(CopyKvParams p, cutlass::FastDivmod page_size, Columns columns) {
  begin_kernel();
  __shared__ RowCopies copies;
  const RowsToCopy rows = rows_to_copy(p, blockIdx.x);
  const bool reports = blockIdx.y == 0;
  if (rows.bits && reports && threadIdx.x == 0) set_status(p.status, rows.dst, rows.bits);

  for (int64_t first = 0; first < rows.count; first += kWarp) {
    if (threadIdx.x < kWarp) {
      const int64_t j = first + threadIdx.x;
      RowCopy copy;
      if (j < rows.count) copy = find_copy(p, page_size, rows, j);
      copies.gather(p.pools, j < rows.count && copy.bits == 0, copy.from, copy.to);
      if (copy.bits && reports) set_status(p.status, rows.dst, copy.bits);
    }
    __syncthreads();  // the rows are known
    copy_rows<Unit, kThreads, kRows>(p.pools, columns, copies);
    __syncthreads();  // before the next rows overwrite them
  }
}

}  // namespace

void copy_kv_cuda(const CopyKvParams& p, Stream stream) {
  dim3 grid(grid_x("copy_kv", p.batch));
  const Columns columns = cut_columns(p.pools, p.batch, kBlocks, kThreads, grid.y);
  with_copy_unit(p.pools.unit, [&]<class Unit>() {
    launch("copy_kv", copy_kv_kernel<Unit>, {.grid = grid, .threads = kThreads}, stream, p,
           cutlass::FastDivmod(static_cast<int>(p.rows.page_size)), columns);
  });
}

}  // namespace specdec::kv
