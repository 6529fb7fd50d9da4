// Copy page-table entries with reference counting.
//
// One block, one thread per row. Every source gains its owner before any destination loses one, so a page that only
// moves is never free in between. The old counts show whether all released pages had an owner. If so, the last row to
// release a page pushes it to the free stack, at a place given by a prefix sum over rows; else one thread does what the
// CPU does. Four dependent accesses (entries, table, owners, stack), 28 bytes per row.
#include "core/cuda.cuh"
#include "kv/assign_pages.h"
#include "kv/tile.cuh"

namespace specdec::kv {
namespace {

constexpr int kThreads = kMaxAssignments;

struct Shared {
  FirstRows<kThreads> first_rows;
  typename cub::BlockScan<int, kThreads>::TempStorage scan;
  int32_t dropped[kThreads];
};

__global__ void __launch_bounds__(kThreads) assign_pages_kernel(AssignPagesParams p) {
  begin_kernel();
  __shared__ Shared s;
  const PagePool& pool = p.pool;
  const int row = threadIdx.x;
  const int64_t height = free_height(pool);

  int32_t entry = row < p.batch ? entry_of(pool, p.dst_entries[row]) : -1;
  if (!s.first_rows.is_first(entry)) entry = -1;
  const int32_t page = entry < 0 ? -1 : page_to_share(pool, p.src_entries[row]);
  __syncthreads();  // all threads have checked for an owner before any page gets a new one
  if (page >= 0) atomicAdd(pool.page_refs + page, 1);
  __syncthreads();  // every source has been read and has its owner

  int32_t old = -1;
  if (entry >= 0) {
    old = pool.page_table[entry];
    pool.page_table[entry] = page;
  }
  if (!is_page(pool, old)) old = -1;
  s.dropped[row] = old;
  const bool owned = old < 0 || atomicSub(pool.page_refs + old, 1) > 0;
  if (!__syncthreads_and(owned)) {
    if (old >= 0) atomicAdd(pool.page_refs + old, 1);
    __syncthreads();  // all releases are undone
    if (row > 0) return;
    int64_t top = height;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t freed = release_page(pool, s.dropped[b], top);
      if (freed >= 0) top = freed;
    }
    *pool.num_free = static_cast<int32_t>(top);
    return;
  }

  bool last = old >= 0 && pool.page_refs[old] == 0;
  __syncthreads();  // all counts are read; now the count of a released page is reused to find its last owner
  if (last) atomicMax(pool.page_refs + old, row + 1);
  __syncthreads();
  last = last && pool.page_refs[old] == row + 1;
  int before, freed;
  cub::BlockScan<int, kThreads>(s.scan).ExclusiveSum(last, before, freed);
  if (last) {
    pool.page_refs[old] = 0;
    if (height + before < pool.num_pages) pool.free_stack[height + before] = old;
  }
  if (row == 0) *pool.num_free = static_cast<int32_t>(min(height + freed, pool.num_pages));
}

}  // namespace

void assign_pages_cuda(const AssignPagesParams& p, Stream stream) {
  launch("assign_pages", assign_pages_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::kv
