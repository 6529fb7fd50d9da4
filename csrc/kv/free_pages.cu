// Free KV pages: drop an owner of each page and push pages without owners to the free stack.
//
// One block. First one thread per row: which entries it frees. Then one thread per page decrements the page's reference
// count, and the old counts decide between three cases:
//   all 1: every page is free now, and is pushed in the order of the pages;
//   all above 0: the last owner to release a page, in that order, pushes it;
//   else (entries without a page, pages without an owner): counts are restored, and one thread does what the CPU does.
// Four dependent accesses (slots; their counts and lengths; table; owners), 12 bytes per page.
#include "core/cuda.cuh"
#include "kv/free_pages.h"
#include "kv/tile.cuh"

namespace specdec::kv {
namespace {

constexpr int kThreads = 256;
constexpr int kPagesPerThread = 2;  // in flight
constexpr int kPages = kPagesPerThread * kThreads;

struct Shared {
  FirstRows<kThreads> first_rows;
  PageIndex<kThreads> page_index;
  int64_t slots[kThreads];
  int ends[kThreads];  // end of the entries that each row frees
  typename cub::BlockScan<int, kThreads>::TempStorage scan;
  int64_t height;

  struct Entry {
    int64_t slot, index;
  };
  // Return the table entry of a page index; a row's last entry comes first.
  __device__ Entry entry_of(int64_t page) const {
    const int row = page_index.row_of(static_cast<int>(page));
    return {slots[row], ends[row] - 1 - (page - page_index.starts[row])};
  }
};

// Free pages first .. first + kPages - 1 of `total`. Return the stack's new height.
__device__ int64_t return_pages(const FreePagesParams& p, Shared& s, int64_t first, int64_t total, int64_t height) {
  const PagePool& pool = p.pool;
  const int pages = static_cast<int>(min(total - first, static_cast<int64_t>(kPages)));
  const auto rank = [](int e) { return e * kThreads + static_cast<int>(threadIdx.x); };
  int32_t* entries[kPagesPerThread];
  int32_t ids[kPagesPerThread], owners[kPagesPerThread];
#pragma unroll
  for (int e = 0; e < kPagesPerThread; ++e) {
    ids[e] = -1;
    if (rank(e) >= pages) continue;
    const auto at = s.entry_of(first + rank(e));
    entries[e] = pool.page_table + at.slot * pool.max_pages + at.index;
    ids[e] = *entries[e];
  }
  bool all_one = true, all_owned = true;
#pragma unroll
  for (int e = 0; e < kPagesPerThread; ++e) {
    if (rank(e) >= pages) continue;
    owners[e] = is_page(pool, ids[e]) ? atomicSub(pool.page_refs + ids[e], 1) : 0;
    all_one &= owners[e] == 1;
    all_owned &= owners[e] > 0;
  }
  const auto push = [&](int e, int64_t place) {
    if (place < pool.num_pages)
      pool.free_stack[place] = ids[e];
    else
      set_status(p.status, s.entry_of(first + rank(e)).slot, kBadPage);
  };

  if (__syncthreads_and(all_one)) {
#pragma unroll
    for (int e = 0; e < kPagesPerThread; ++e) {
      if (rank(e) >= pages) break;
      *entries[e] = -1;
      push(e, height + rank(e));
    }
    return min(height + pages, pool.num_pages);
  }

  if (__syncthreads_and(all_owned)) {
    bool last[kPagesPerThread];
#pragma unroll
    for (int e = 0; e < kPagesPerThread; ++e) last[e] = rank(e) < pages && pool.page_refs[ids[e]] == 0;
    __syncthreads();  // all counts are read; now the count of a released page is reused to find its last owner
#pragma unroll
    for (int e = 0; e < kPagesPerThread; ++e)
      if (last[e]) atomicMax(pool.page_refs + ids[e], rank(e) + 1);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kPagesPerThread; ++e) last[e] = last[e] && pool.page_refs[ids[e]] == rank(e) + 1;
#pragma unroll
    for (int e = 0; e < kPagesPerThread; ++e) {
      int before, freed;
      cub::BlockScan<int, kThreads>(s.scan).ExclusiveSum(last[e], before, freed);
      if (rank(e) < pages) *entries[e] = -1;
      if (last[e]) {
        pool.page_refs[ids[e]] = 0;
        push(e, height + before);
      }
      height = min(height + freed, pool.num_pages);
      __syncthreads();  // the scan's storage is reused, and the next pages see these owners
    }
    return height;
  }

#pragma unroll
  for (int e = 0; e < kPagesPerThread; ++e)
    if (is_page(pool, ids[e])) atomicAdd(pool.page_refs + ids[e], 1);
  __syncthreads();  // all counts are restored
  if (threadIdx.x == 0) {
    for (int i = 0; i < pages; ++i) {
      const auto at = s.entry_of(first + i);
      height = return_page(p, at.slot, at.index, height);
    }
    s.height = height;
  }
  __syncthreads();
  return s.height;
}

__global__ void __launch_bounds__(kThreads) free_pages_kernel(FreePagesParams p) {
  begin_kernel();
  __shared__ Shared s;
  const int row = threadIdx.x;
  int64_t height = free_height(p.pool);

  for (int64_t first = 0; first < p.batch; first += kThreads) {
    int64_t slot = first + row < p.batch ? slot_of(p.slots, first + row, p.pool.num_slots) : -1;
    const int32_t start = slot < 0 ? 0 : p.pool.page_starts[slot], count = slot < 0 ? 0 : p.pool.page_counts[slot];
    const int32_t len = slot < 0 ? 0 : p.prefix_lens[slot];
    // Deduplicate slots while the loads are in flight. A slot that has freed its pages has nothing more to free, so
    // once per tile equals once per row.
    if (p.slots && !s.first_rows.is_first(static_cast<int>(slot))) slot = -1;
    const PagesToFree to_free = pages_to_free(p, start, count, len);
    if (slot >= 0) {
      if (!to_free.valid) {
        set_status(p.status, slot, kBadLength);
      } else {
        p.pool.page_starts[slot] = static_cast<int32_t>(to_free.start);
        p.pool.page_counts[slot] = static_cast<int32_t>(to_free.count);
      }
    }

    const int total = s.page_index.build(slot < 0 ? 0 : to_free.end - to_free.first);
    s.slots[row] = slot;
    s.ends[row] = static_cast<int>(to_free.end);
    __syncthreads();  // the rows and their pages are known
    for (int64_t i = 0; i < total; i += kPages) height = return_pages(p, s, i, total, height);
    __syncthreads();  // the next tile sees this one's counts, and may reuse the shared arrays
  }
  if (row == 0) *p.pool.num_free = static_cast<int32_t>(height);
}

}  // namespace

void free_pages_cuda(const FreePagesParams& p, Stream stream) {
  launch("free_pages", free_pages_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::kv
