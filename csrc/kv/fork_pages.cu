// One block, a thread a row: what it shares, and by a scan over the rows which page of the stack its partial page
// becomes (each takes one at most, so those beyond the stack's height are the ones that go without). Then a thread a
// shared page. Reads and writes 16 bytes a page.
#include "core/cuda.cuh"
#include "kv/fork_pages.h"
#include "kv/tile.cuh"

namespace specdec::kv {
namespace {

constexpr int kThreads = kMaxForks;
constexpr int kEach = 2;  // pages of a thread at a time

struct Shared {
  FirstRows<kThreads> first_rows;
  PageNumbers<kThreads> numbers;
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
  bool made = s.first_rows.is_first(static_cast<int>(fork.dst));  // from here on slots may be changed
  if (made && fork.bits) {
    set_status(p.status, fork.dst, fork.bits);
    made = false;
  }

  int before, wanted;
  cub::BlockScan<int, kThreads>(s.scan).ExclusiveSum(made && fork.num_rows > 0, before, wanted);
  if (made && fork.num_rows > 0 && before >= height) {
    set_status(p.status, fork.dst, kStalled);
    made = false;
  }
  if (made) {
    clear_status(p.status, fork.dst, kStalled);
    p.pool.page_starts[fork.dst] = static_cast<int32_t>(fork.first);
    p.pool.page_counts[fork.dst] = static_cast<int32_t>(fork.pages + (fork.num_rows > 0));
  }
  if (row < p.batch) p.out_num_rows[row] = made ? fork.num_rows : 0;
  if (row == 0) *p.pool.num_free = static_cast<int32_t>(max(height - wanted, int64_t{0}));

  s.src[row] = fork.src;
  s.dst[row] = fork.dst;
  s.first[row] = fork.first;
  const int total = s.numbers.number(made ? fork.pages - fork.first : 0);
  __syncthreads();  // the rows and their pages are known
  for (int64_t page = row; page < total; page += kEach * kThreads) {
    int64_t entries[kEach];
    int rows[kEach];
    int32_t ids[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t i = page + e * kThreads;
      if (i >= total) break;
      rows[e] = s.numbers.row_of(static_cast<int>(i));
      entries[e] = s.first[rows[e]] + i - s.numbers.starts[rows[e]];
      ids[e] = p.pool.page_table[s.src[rows[e]] * p.pool.max_pages + entries[e]];
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t i = page + e * kThreads;
      if (i < total) share_page(p, ids[e], s.dst[rows[e]], entries[e]);
    }
  }
  __syncthreads();  // what is shared has its owners; new pages have one, whatever the stack held
  if (made && fork.num_rows > 0)
    put_page(p.pool, p.status, p.pool.free_stack[height - 1 - before], fork.dst, fork.pages);
}

}  // namespace

void fork_pages_cuda(const ForkPagesParams& p, Stream stream) {
  launch("fork_pages", fork_pages_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::kv
