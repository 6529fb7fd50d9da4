// Allocate KV pages: pop pages from the free stack and append them to slots' page tables.
//
// One block. First one thread per row: how many pages it needs, and by a prefix sum over rows which range of the stack
// it gets. If the stack is too low for all rows, one warp decides row by row. Then one thread per page. Three dependent
// reads (slots; counts and lengths; stack), 12 bytes per page.
#include "core/cuda.cuh"
#include "kv/alloc_pages.h"
#include "kv/tile.cuh"

namespace specdec::kv {
namespace {

constexpr int kThreads = 256;
constexpr int kPagesPerThread = 2;  // in flight

struct Shared {
  FirstRows<kThreads> first_rows;
  PageIndex<kThreads> page_index;
  int64_t slots[kThreads];
  int held[kThreads];
  int num_needed[kThreads];  // if the stack is too low: pages needed, then -1 for a stalled row
  int total;
};

// Serve a tile whose rows need more pages than there are: in row order, each gets its range or is stalled. Called by
// one warp; lanes broadcast their rows' needs, so a step depends on the running total only.
__device__ void serve_in_order(Shared& s, int64_t height) {
  const int lane = threadIdx.x;
  int total = 0;
  for (int first = 0; first < kThreads; first += kWarp) {
    const int needed = s.num_needed[first + lane];
    s.page_index.starts[first + lane] = total;  // for rows that need nothing
    if (!__any_sync(kFullMask, needed > 0)) continue;
#pragma unroll 8
    for (int i = 0; i < kWarp; ++i) {
      const int next = __shfl_sync(kFullMask, needed, i);
      const bool fits = next <= height - total;
      if (lane == i) {
        s.page_index.starts[first + i] = total;
        if (!fits) s.num_needed[first + i] = -1;
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
    // Deduplicate slots while the loads are in flight. Serving a slot twice changes nothing: a served slot needs
    // nothing more, and a refused one is refused again, since pages only become fewer. So once per tile equals once per
    // row.
    if (p.slots && !s.first_rows.is_first(static_cast<int>(slot))) slot = -1;
    const int64_t held = pages_held(p.pool, count);
    int64_t need = slot < 0 ? 0 : pages_to_add(p, held, len);
    if (need < 0) {
      set_status(p.status, slot, kBadLength);
      slot = -1;
      need = 0;
    }

    int total = s.page_index.build(need);
    s.slots[row] = slot;
    s.held[row] = static_cast<int>(held);
    bool stalled = false;
    if (total > height) {
      s.num_needed[row] = static_cast<int>(need);
      __syncthreads();  // lacking is written
      if (row < kWarp) serve_in_order(s, height);
      __syncthreads();  // every range is decided
      stalled = s.num_needed[row] < 0;
      total = s.total;
    }
    if (stalled) {
      set_status(p.status, slot, kStalled);
    } else if (slot >= 0) {
      p.pool.page_counts[slot] = static_cast<int32_t>(held + need);
      clear_status(p.status, slot, kStalled);
    }
    __syncthreads();  // the rows and their pages are known

    for (int64_t page = row; page < total; page += kPagesPerThread * kThreads) {
      int32_t ids[kPagesPerThread];
#pragma unroll
      for (int e = 0; e < kPagesPerThread; ++e)
        if (page + e * kThreads < total) ids[e] = p.pool.free_stack[height - 1 - page - e * kThreads];
#pragma unroll
      for (int e = 0; e < kPagesPerThread; ++e) {
        const int64_t i = page + e * kThreads;
        if (i >= total) break;
        const int to = s.page_index.row_of(static_cast<int>(i));
        put_page(p.pool, p.status, ids[e], s.slots[to], s.held[to] + i - s.page_index.starts[to]);
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
