// Parts shared by the page kernels, which run one block: first one thread per row of `slots`, then one thread per page
// of those rows.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>

namespace specdec::kv {

// Finds rows whose slot occurs in an earlier row of the block. A hash table in shared memory, at most half full, so
// that a search ends.
template <int kThreads>
class FirstRows {
 public:
  // Return whether this thread's row is the first with its slot; called by the whole block. `slot` is -1 for none.
  __device__ bool is_first(int slot) {
    for (int i = threadIdx.x; i < kSize; i += kThreads) {
      slots_[i] = -1;
      rows_[i] = kThreads;
    }
    __syncthreads();
    int at = slot & (kSize - 1);
    if (slot >= 0) {
      for (;; at = (at + 1) & (kSize - 1)) {
        const int found = atomicCAS(&slots_[at], -1, slot);
        if (found == -1 || found == slot) break;
      }
      atomicMin(&rows_[at], static_cast<int>(threadIdx.x));
    }
    __syncthreads();
    return slot >= 0 && rows_[at] == static_cast<int>(threadIdx.x);
  }

 private:
  static constexpr int kSize = 2 * kThreads;
  static_assert((kSize & (kSize - 1)) == 0);
  int slots_[kSize], rows_[kSize];
};

// A flat index of the pages of a tile's rows: row r has indices starts[r] to starts[r + 1] - 1. Rows have different
// slots, and a table has fewer than 2^31 entries (check_pool), so 32 bits are enough. In shared memory.
template <int kThreads>
struct PageIndex {
  using Scan = cub::BlockScan<int, kThreads>;
  typename Scan::TempStorage scan;
  int starts[kThreads];

  // Build the index from the number of pages of each thread's row; called by the whole block. Return the total. Call
  // __syncthreads before lookups.
  __device__ int build(int64_t pages) {
    int start, total;
    Scan(scan).ExclusiveSum(static_cast<int>(pages), start, total);
    starts[threadIdx.x] = start;
    return total;
  }

  // Return the row of a page index: the last row that starts at or before it (a row without pages starts where the next
  // one does).
  __device__ int row_of(int64_t page) const {
    int row = 0;
    for (int step = kThreads / 2; step > 0; step /= 2)
      if (starts[row + step] <= page) row += step;
    return row;
  }
};

}  // namespace specdec::kv
