// Packed (ragged) rows: request b owns rows cu_seqlens[b] to cu_seqlens[b + 1] - 1; rows after the last request's are
// padding.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace specdec {

struct RowRange {
  int64_t first, count;
};

// Return the rows of request b; empty if they would exceed `num_rows`.
SD_HD RowRange packed_rows(const int32_t* cu_seqlens, int64_t b, int64_t num_rows) {
  const int64_t first = cu_seqlens[b], end = cu_seqlens[b + 1];
  return first >= 0 && first <= end && end <= num_rows ? RowRange{first, end - first} : RowRange{0, 0};
}

// Return the request that owns a row, or -1. The search is bounded whatever cu_seqlens contains.
SD_HD int64_t request_of_row(const int32_t* cu_seqlens, int64_t batch, int64_t row) {
  int64_t low = 0, high = batch;  // the last request that begins at or before `row` is in [low - 1, high)
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle] <= row)
      low = middle + 1;
    else
      high = middle;
  }
  return low > 0 && cu_seqlens[low - 1] >= 0 && row < cu_seqlens[low] ? low - 1 : -1;
}

}  // namespace specdec
