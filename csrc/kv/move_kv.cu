// Compact the KV rows of an accepted path, in every layer.
//
// One block per request (blockIdx.x) and range of columns over all layers (blockIdx.y); a column is 16 bytes of K and
// of V. The block's first warp finds the moves, one lane per path entry, so a chain, which moves nothing, ends after
// two dependent reads. Reads and writes 2 * layers * heads * head_bytes per moved row.
#include "kv/move_kv.h"
#include "kv/row_copies.cuh"

namespace specdec::kv {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kBlocks = 2112;  // approximate grid size
constexpr int kRows = 4;           // in flight: most paths are no longer

// Return whether a path of at most 32 entries needs no moves. That takes one read, and many blocks do nothing else. A
// request's first block does not use it, because it reports errors.
__device__ bool is_in_place(const int32_t* path, int count, int64_t accept_width) {
  const int j = threadIdx.x % kWarp;
  const int node = j < accept_width ? path[j] : j;
  return __all_sync(kFullMask, j >= count || node == j) && count <= kWarp;
}

template <class Unit>
__global__ void __launch_bounds__(kThreads)
    move_kv_kernel(MoveKvParams p, cutlass::FastDivmod page_size, Columns columns) {
  begin_kernel();
  __shared__ RowCopies copies;
  __shared__ int32_t why_stopped;
  const int64_t b = blockIdx.x;
  const int32_t* path = p.path + b * p.accept_width;
  if (blockIdx.y > 0 && is_in_place(path, p.num_valid[b], p.accept_width)) return;
  const PathToMove request = path_to_move(p, b);
  int32_t bits = request.bits;

  for (int64_t first = 0; first < request.count && bits == 0; first += kWarp) {
    if (threadIdx.x < kWarp) {
      const int64_t j = first + threadIdx.x;
      RowMove move;
      if (j < request.count) move = find_move(p, page_size, request, path, j);
      const unsigned stops = __ballot_sync(kFullMask, move.bits != 0);
      const unsigned before_stop = stops ? (stops & -stops) - 1 : kFullMask;
      copies.gather(p.pools, move.needed && (before_stop >> threadIdx.x & 1), move.from, move.to);
      const int32_t why = __shfl_sync(kFullMask, move.bits, stops ? __ffs(stops) - 1 : 0);
      if (threadIdx.x == 0) why_stopped = why;
    }
    __syncthreads();  // the moves are known
    bits = why_stopped;
    copy_rows<Unit, kThreads, kRows>(p.pools, columns, copies);
    if (request.count > first + kWarp) __syncthreads();  // before the next moves overwrite them
  }
  if (bits && blockIdx.y == 0 && threadIdx.x == 0) set_status(p.status, request.slot, bits);
}

}  // namespace

void move_kv_cuda(const MoveKvParams& p, Stream stream) {
  dim3 grid(grid_x("move_kv", p.batch));
  const Columns columns = cut_columns(p.pools, p.batch, kBlocks, kThreads, grid.y);
  with_copy_unit(p.pools.unit, [&]<class Unit>() {
    launch("move_kv", move_kv_kernel<Unit>, {.grid = grid, .threads = kThreads}, stream, p,
           cutlass::FastDivmod(static_cast<int>(p.rows.page_size)), columns);
  });
}

}  // namespace specdec::kv
