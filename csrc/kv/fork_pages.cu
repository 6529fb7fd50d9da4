// Fork slots: share the full pages of a prefix, and allocate a page for the partial one after them.
//
// One block. First one thread per row: what it shares, and by a prefix sum over rows which page of the stack its
// partial page gets (at most one per row, so rows past the stack's height stall). Then one thread per shared page.
// Reads and writes 16 bytes per page.
#include "core/cuda.cuh"
#include "kv/fork_pages.h"
#include "kv/tile.cuh"

namespace specdec::kv {
namespace {

constexpr int kThreads = kMaxForks;
constexpr int kPagesPerThread = 2;  // in flight

struct Shared {
  FirstRows<kThreads> first_rows;
  PageIndex<kThreads> page_index;
  typename cub::BlockScan<int, kThreads>::TempStorage scan;
  int64_t src[kThreads], dst[kThreads], first[kThreads];
};

__global__ void __launch_bounds__(kThreads) fork_pages_kernel(ForkPagesParams p) {
  begin_kernel();
  __shared__ Shared s;
  const int row = threadIdx.x;
  const int64_t height = free_height(p.pool);
  Fork fork{.src = -1, .dst = -1};
  if (row < p.batch) fork = find_fork(p, row);
  bool accepted = s.first_rows.is_first(static_cast<int>(fork.dst));  // a barrier: from here on slots may be changed
  if (accepted && fork.bits) {
    set_status(p.status, fork.dst, fork.bits);
    accepted = false;
  }

  int before, wanted;
  cub::BlockScan<int, kThreads>(s.scan).ExclusiveSum(accepted && fork.num_rows > 0, before, wanted);
  if (accepted && fork.num_rows > 0 && before >= height) {
    set_status(p.status, fork.dst, kStalled);
    accepted = false;
  }
  if (accepted) {
    clear_status(p.status, fork.dst, kStalled);
    p.pool.page_starts[fork.dst] = static_cast<int32_t>(fork.first);
    p.pool.page_counts[fork.dst] = static_cast<int32_t>(fork.pages + (fork.num_rows > 0));
  }
  if (row < p.batch) p.out_num_rows[row] = accepted ? fork.num_rows : 0;
  if (row == 0) *p.pool.num_free = static_cast<int32_t>(max(height - wanted, int64_t{0}));

  s.src[row] = fork.src;
  s.dst[row] = fork.dst;
  s.first[row] = fork.first;
  const int total = s.page_index.build(accepted ? fork.pages - fork.first : 0);
  __syncthreads();  // the rows and their pages are known
  for (int64_t page = row; page < total; page += kPagesPerThread * kThreads) {
    int64_t entries[kPagesPerThread];
    int rows[kPagesPerThread];
    int32_t ids[kPagesPerThread];
#pragma unroll
    for (int e = 0; e < kPagesPerThread; ++e) {
      const int64_t i = page + e * kThreads;
      if (i >= total) break;
      rows[e] = s.page_index.row_of(static_cast<int>(i));
      entries[e] = s.first[rows[e]] + i - s.page_index.starts[rows[e]];
      ids[e] = p.pool.page_table[s.src[rows[e]] * p.pool.max_pages + entries[e]];
    }
#pragma unroll
    for (int e = 0; e < kPagesPerThread; ++e) {
      const int64_t i = page + e * kThreads;
      if (i < total) share_page(p, ids[e], s.dst[rows[e]], entries[e]);
    }
  }
  __syncthreads();  // shared pages have their owners; now new pages get exactly one, even if the stack names a shared
                    // page
  if (accepted && fork.num_rows > 0)
    put_page(p.pool, p.status, p.pool.free_stack[height - 1 - before], fork.dst, fork.pages);
}

}  // namespace

void fork_pages_cuda(const ForkPagesParams& p, Stream stream) {
  launch("fork_pages", fork_pages_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::kv
