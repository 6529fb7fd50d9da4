// One block, tile after tile of rows. Every thread works out what its row keeps; then one warp takes the rows in order,
// 32 pages at a time, and lanes that hold the same page settle who is its last owner as a serial loop would. Reads and
// writes 12 bytes a page returned.
#include "core/cuda.cuh"
#include "kv/free_pages.h"
#include "kv/tile.cuh"

namespace specdec {
namespace {

constexpr int kThreads = 256;

// A whole warp returns up to 32 pages of a slot, entry `last - lane` by each lane; gives the stack's new height.
__device__ int64_t return_pages(const FreePagesParams& p, int64_t slot, int64_t last, int64_t kept, int64_t height) {
  const PagePool& pool = p.pool;
  const int lane = threadIdx.x % kWarp;
  const unsigned lanes_before = (1u << lane) - 1;
  const bool mine = last - lane >= kept;

  int32_t page = -1;
  if (mine) {
    int32_t& entry = pool.page_table[slot * pool.max_pages + last - lane];
    page = entry;
    entry = -1;
  }
  const bool sound = mine && is_page(pool, page);
  const int32_t refs = sound ? pool.page_refs[page] : 0;
  __syncwarp();  // page_refs is read before anyone writes it

  const unsigned same_page = __match_any_sync(kFullMask, sound ? page : -1);
  const int owner = __popc(same_page & lanes_before);  // this lane is the owner-th to let go of the page
  const bool let_go = refs > owner;
  const bool now_free = refs == owner + 1;
  const unsigned freed = __ballot_sync(kFullMask, now_free);

  bool bad = mine && !let_go;
  if (sound && owner == 0 && refs > 0) pool.page_refs[page] = max(refs - __popc(same_page), 0);
  if (now_free) {
    const int64_t at = height + __popc(freed & lanes_before);
    if (at < pool.num_pages)
      pool.free_stack[at] = page;
    else
      bad = true;
  }
  if (bad) set_status(p.status, slot, kBadPage);
  __syncwarp();  // the next pages see these references
  return min(height + __popc(freed), pool.num_pages);
}

__global__ void __launch_bounds__(kThreads) free_pages_kernel(FreePagesParams p) {
  __shared__ int64_t slot_at[kThreads];  // -1: nothing to do
  __shared__ int64_t kept_at[kThreads];
  __shared__ int64_t held_at[kThreads];
  int64_t height = free_height(p.pool);  // of the stack; only warp 0's is kept up to date

  for (int64_t first = 0; first < p.batch; first += kThreads) {
    const int rows = static_cast<int>(min(p.batch - first, static_cast<int64_t>(kThreads)));
    const int row = threadIdx.x;
    if (row < rows) slot_at[row] = slot_of(p.slots, first + row, p.pool.num_slots);
    __syncthreads();  // slot_at is written, and everyone knows the height

    const int64_t slot = row < rows && first_of_its_slot(slot_at, row) ? slot_at[row] : -1;
    const int64_t kept = slot < 0 ? -1 : pages_kept(p, slot);
    if (slot >= 0 && kept < 0) set_status(p.status, slot, kBadLength);
    __syncthreads();  // first_of_its_slot has read slot_at
    if (row < rows) {
      slot_at[row] = kept < 0 ? -1 : slot;
      kept_at[row] = kept;
      held_at[row] = kept < 0 ? -1 : pages_held(p.pool, slot);
      if (kept >= 0) p.pool.page_counts[slot] = static_cast<int32_t>(kept);
    }
    __syncthreads();  // the tile's rows are known

    if (threadIdx.x < kWarp)
      for (int r = 0; r < rows; ++r)
        if (slot_at[r] >= 0)
          for (int64_t last = held_at[r] - 1; last >= kept_at[r]; last -= kWarp)
            height = return_pages(p, slot_at[r], last, kept_at[r], height);
    __syncthreads();  // the next tile sees this one's counts, and may reuse the shared arrays
  }
  if (threadIdx.x == 0) *p.pool.num_free = static_cast<int32_t>(height);
}

}  // namespace

void free_pages_cuda(const FreePagesParams& p, Stream stream) {
  free_pages_kernel<<<1, kThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("free_pages");
}

}  // namespace specdec
