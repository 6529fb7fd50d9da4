// One block, tile after tile of rows. Every thread works out what its row lacks, one thread hands out stretches of the
// stack in row order, then a warp a row fills its stretch. Reads and writes 12 bytes a page and row.
#include "core/cuda.cuh"
#include "kv/alloc_pages.h"
#include "kv/tile.cuh"

namespace specdec {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) alloc_pages_kernel(AllocPagesParams p) {
  __shared__ int64_t slot_at[kThreads];    // -1: nothing to do
  __shared__ int64_t lacking[kThreads];    // pages the row gets
  __shared__ int64_t height_at[kThreads];  // of the stack, when the row is served
  __shared__ int64_t height;
  if (threadIdx.x == 0) height = free_height(p.pool);

  for (int64_t first = 0; first < p.batch; first += kThreads) {
    const int rows = static_cast<int>(min(p.batch - first, static_cast<int64_t>(kThreads)));
    const int row = threadIdx.x;
    if (row < rows) slot_at[row] = slot_of(p.slots, first + row, p.pool.num_slots);
    __syncthreads();  // slot_at (and height) are written

    const int64_t slot = row < rows && first_of_its_slot(slot_at, row) ? slot_at[row] : -1;
    const int64_t held = slot < 0 ? 0 : pages_held(p.pool, slot);
    int64_t need = slot < 0 ? 0 : pages_lacking(p, slot);
    if (need < 0) set_status(p.status, slot, kBadLength);
    __syncthreads();  // first_of_its_slot has read slot_at
    if (row < rows) {
      slot_at[row] = need < 0 ? -1 : slot;
      lacking[row] = need;
    }
    __syncthreads();  // slot_at and lacking are written

    if (threadIdx.x == 0) {
      for (int r = 0; r < rows; ++r) {
        if (slot_at[r] < 0) continue;
        height_at[r] = height;
        if (lacking[r] <= height)
          height -= lacking[r];
        else
          lacking[r] = -1;  // stalled
      }
    }
    __syncthreads();  // every stretch is settled

    for (int r = threadIdx.x / kWarp; r < rows; r += kThreads / kWarp)
      if (slot_at[r] >= 0)
        for (int64_t i = threadIdx.x % kWarp; i < lacking[r]; i += kWarp)
          give_page(p, slot_at[r], pages_held(p.pool, slot_at[r]), height_at[r], i);
    __syncthreads();  // page_counts has been read for the last time

    if (row < rows && slot_at[row] >= 0) {
      if (lacking[row] < 0) {
        set_status(p.status, slot, kStalled);
      } else {
        p.pool.page_counts[slot] = static_cast<int32_t>(held + lacking[row]);
        clear_status(p.status, slot, kStalled);
      }
    }
    __syncthreads();  // the next tile sees this one's counts, and may reuse the shared arrays
  }
  if (threadIdx.x == 0) *p.pool.num_free = static_cast<int32_t>(height);
}

}  // namespace

void alloc_pages_cuda(const AllocPagesParams& p, Stream stream) {
  alloc_pages_kernel<<<1, kThreads, 0, stream>>>(p);
  SD_LAUNCH_CHECK("alloc_pages");
}

}  // namespace specdec
