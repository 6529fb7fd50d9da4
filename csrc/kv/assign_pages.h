// assign_pages: copies page-table entries with reference counting, like assigning shared pointers. For prefix caching.
#pragma once

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec::kv {

// Maximum rows per call: one block handles all of them at once, so every row sees the table as it was before the call.
constexpr int64_t kMaxAssignments = 512;

struct AssignPagesParams {
  PagePool pool;
  const int32_t* src_entries;  // [batch]: slot * max_pages + index, -1 for no page
  const int32_t* dst_entries;  // [batch]: slot * max_pages + index, -1 for an empty row
  int64_t batch;
};

void assign_pages(CallStream stream, const PoolTensors& tensors, const TensorView& src_entries,
                  const TensorView& dst_entries);

void assign_pages_cpu(const AssignPagesParams& p);
void assign_pages_cuda(const AssignPagesParams& p, Stream stream);

// Return a table entry's index, or -1 if it is out of range.
SD_HD int32_t entry_of(const PagePool& pool, int32_t index) {
  return index >= 0 && index < pool.num_slots * pool.max_pages ? index : -1;
}

// Return the page of a source entry if it can get one more owner, else -1.
SD_HD int32_t page_to_share(const PagePool& pool, int32_t src) {
  const int32_t entry = entry_of(pool, src);
  const int32_t page = entry < 0 ? -1 : pool.page_table[entry];
  return is_page(pool, page) && pool.page_refs[page] > 0 && pool.page_refs[page] < INT32_MAX - kMaxAssignments ? page
                                                                                                               : -1;
}

}  // namespace specdec::kv
