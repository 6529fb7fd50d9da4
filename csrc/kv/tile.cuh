// What the page kernels share: one block, first a thread a row of `slots`, then a thread a page of those rows.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>

namespace specdec::kv {

// Finds rows that name a slot which an earlier row of the block names. A hash table, in shared memory, of twice the
// slots it can hold, so that a search ends.
template <int kThreads>
class FirstRows {
 public:
  // Called by the whole block, a row a thread; `slot` is -1 for none.
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

// The pages of a tile's rows, numbered through: row r's are numbers starts[r] to starts[r + 1] - 1. Rows work for
// different slots, and a table has fewer than 2^31 entries (check_pool), so 32 bits do. In shared memory.
template <int kThreads>
struct PageNumbers {
  using Scan = cub::BlockScan<int, kThreads>;
  typename Scan::TempStorage scan;
  int starts[kThreads];

  // Called by the whole block with the pages of each thread's row: gives their total. They can be looked up after a
  // __syncthreads.
  __device__ int number(int64_t pages) {
    int start, total;
    Scan(scan).ExclusiveSum(static_cast<int>(pages), start, total);
    starts[threadIdx.x] = start;
    return total;
  }

  // The row of a page: the last one that starts at or before it (rows without pages start where the next one does).
  __device__ int row_of(int64_t page) const {
    int row = 0;
    for (int step = kThreads / 2; step > 0; step /= 2)
      if (starts[row + step] <= page) row += step;
    return row;
  }
};

}  // namespace specdec::kv
