// One block, a thread a row: what it lacks, and by a scan over the rows which stretch of the stack it gets. Where the
// stack does not suffice for all, one warp decides row by row. Then a thread a page. A chain of three dependent reads
// (slots, counts and lengths, stack), 12 bytes a page.
#include "core/cuda.cuh"
#include "kv/alloc_pages.h"
#include "kv/tile.cuh"

namespace specdec::kv {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 2;  // pages of a thread at a time

struct Shared {
  FirstRows<kThreads> first_rows;
  PageNumbers<kThreads> numbers;
  int64_t slots[kThreads];
  int held[kThreads];
  int lacking[kThreads];  // where the stack is too low: pages wanted, then -1 for a stalled row
  int total;
};

// Settles a tile whose rows want more than there is: each gets its stretch or is stalled, in the order of the rows. By
// one warp, whose lanes pass their rows' wants round, so that a step waits for the sum alone.
__device__ void serve_serially(Shared& s, int64_t height) {
  const int lane = threadIdx.x;
  int total = 0;
  for (int first = 0; first < kThreads; first += kWarp) {
    const int wanted = s.lacking[first + lane];
    s.numbers.starts[first + lane] = total;  // of rows that want nothing
    if (!__any_sync(kFullMask, wanted > 0)) continue;
#pragma unroll 8
    for (int i = 0; i < kWarp; ++i) {
      const int next = __shfl_sync(kFullMask, wanted, i);
      const bool fits = next <= height - total;
      if (lane == i) {
        s.numbers.starts[first + i] = total;
        if (!fits) s.lacking[first + i] = -1;
      }
      if (fits) total += next;
    }
  }
  if (lane == 0) s.total = total;
}

__global__ void __launch_bounds__(kThreads) alloc_pages_kernel(AllocPagesParams p) {
  begin_kernel();
  __shared__ Shared s;
  const int row = threadIdx.x;
  int64_t height = free_height(p.pool);

  for (int64_t first = 0; first < p.batch; first += kThreads) {
    int64_t slot = first + row < p.batch ? slot_of(p.slots, first + row, p.pool.num_slots) : -1;
    const int32_t count = slot < 0 ? 0 : p.pool.page_counts[slot], len = slot < 0 ? 0 : p.seq_lens[slot];
    // This is done while the loads are on their way. Serving a slot twice changes nothing: a served one lacks nothing,
    // and a refused one is refused again, since pages only get fewer. So once a tile equals once a row.
    if (p.slots && !s.first_rows.is_first(static_cast<int>(slot))) slot = -1;
    const int64_t held = pages_held(p.pool, count);
    int64_t need = slot < 0 ? 0 : pages_lacking(p, held, len);
    if (need < 0) {
      set_status(p.status, slot, kBadLength);
      slot = -1;
      need = 0;
    }

    int total = s.numbers.number(need);
    s.slots[row] = slot;
    s.held[row] = static_cast<int>(held);
    bool stalled = false;
    if (total > height) {
      s.lacking[row] = static_cast<int>(need);
      __syncthreads();  // lacking is written
      if (row < kWarp) serve_serially(s, height);
      __syncthreads();  // every stretch is settled
      stalled = s.lacking[row] < 0;
      total = s.total;
    }
    if (stalled) {
      set_status(p.status, slot, kStalled);
    } else if (slot >= 0) {
      p.pool.page_counts[slot] = static_cast<int32_t>(held + need);
      clear_status(p.status, slot, kStalled);
    }
    __syncthreads();  // the rows and their pages are known

    for (int64_t page = row; page < total; page += kEach * kThreads) {
      int32_t ids[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if (page + e * kThreads < total) ids[e] = p.pool.free_stack[height - 1 - page - e * kThreads];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int64_t i = page + e * kThreads;
        if (i >= total) break;
        const int to = s.numbers.row_of(static_cast<int>(i));
        put_page(p.pool, p.status, ids[e], s.slots[to], s.held[to] + i - s.numbers.starts[to]);
      }
    }
    height -= total;
    __syncthreads();  // the next tile sees this one's counts, and may reuse the shared arrays
  }
  if (row == 0) *p.pool.num_free = static_cast<int32_t>(height);
}

}  // namespace

void alloc_pages_cuda(const AllocPagesParams& p, Stream stream) {
  launch("alloc_pages", alloc_pages_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::kv
