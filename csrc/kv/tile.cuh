// Rows that name the same slot twice in one call.
#pragma once

#include <cstdint>

namespace specdec {

// Whether no earlier row of the tile works for this row's slot. alloc_pages and free_pages are idempotent within a
// call (a served slot lacks nothing, a refused one is refused again since pages only get fewer, a freed one holds
// nothing more), so doing each slot once per tile equals doing its rows one after another.
__device__ __forceinline__ bool first_of_its_slot(const int64_t* slot_at, int row) {
  for (int earlier = 0; earlier < row; ++earlier)
    if (slot_at[earlier] == slot_at[row]) return false;
  return true;
}

}  // namespace specdec
