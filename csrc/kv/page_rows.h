// Lookup of a slot's KV row in a paged pool, the same on CPU and GPU. Row r of a slot is row r % page_size of page
// page_table[slot, r / page_size], in every layer's pool.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/slots.h"

namespace specdec::kv {

struct PageRows {
  const int32_t* page_table;  // [num_slots, max_pages]
  const int32_t* page_refs;   // [num_pages], or null: every page counts as the slot's own
  int64_t max_pages, num_pages;
  int64_t page_size;
};

// Return the maximum rows of a slot; lengths are int32.
SD_HD int64_t row_capacity(const PageRows& rows) {
  const int64_t capacity = rows.max_pages * rows.page_size;
  return capacity < INT32_MAX ? capacity : INT32_MAX;
}

// Divides rows by the page size, with the interface of cutlass::FastDivmod, which kernels use.
struct RowDivmod {
  int page_size;
  void operator()(int& quotient, int& remainder, int row) const {
    quotient = row / page_size;
    remainder = row % page_size;
  }
};

struct KvRow {
  int32_t page = -1, offset = 0;  // page, and row within the page
  int32_t bits = 0;               // for the slot's status if there is no such row, else 0
};

// Look up `row` of a slot, for reading.
template <class Divmod>
SD_HD KvRow find_row(const PageRows& rows, const Divmod& divmod, int64_t slot, int64_t row) {
  KvRow at;
  int index = 0;
  if (row >= 0 && row <= INT32_MAX) divmod(index, at.offset, static_cast<int>(row));
  if (row < 0 || row > INT32_MAX || index >= rows.max_pages) {
    at.bits = kBadLength;
    return at;
  }
  at.page = rows.page_table[slot * rows.max_pages + index];
  if (at.page < 0 || at.page >= rows.num_pages) at.bits = kBadPage;
  return at;
}

// Look up `row` of a slot, for writing: a page with several owners is refused.
template <class Divmod>
SD_HD KvRow find_own_row(const PageRows& rows, const Divmod& divmod, int64_t slot, int64_t row) {
  KvRow at = find_row(rows, divmod, slot, row);
  if (at.bits == 0 && rows.page_refs && rows.page_refs[at.page] > 1) at.bits = kSharedPage;
  return at;
}

// A pool [.., num_pages, page_size, heads, head_dim] of any dtype, with strides in bytes.
struct PoolView {
  char* data;
  int64_t page_stride, row_stride, head_stride;
};

SD_HD char* row_data(const PoolView& pool, KvRow at) {
  return pool.data + at.page * pool.page_stride + at.offset * pool.row_stride;
}

}  // namespace specdec::kv
