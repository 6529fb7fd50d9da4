// assign_pages: makes entries of the page table name the pages of others, as shared pointers are assigned.
#pragma once

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec::kv {

// Rows of a call at most: one block does them all at once, so that every row sees the table as it was before it.
constexpr int64_t kMaxAssignments = 512;

struct AssignPagesParams {
  PagePool pool;
  const int32_t* src_entries;  // [batch]: slot * max_pages + index, -1 for no page
  const int32_t* dst_entries;  // [batch]: likewise, -1 for an empty row
  int64_t batch;
};

void assign_pages(CallStream stream, const PoolTensors& tensors, const TensorView& src_entries,
                  const TensorView& dst_entries);

void assign_pages_cpu(const AssignPagesParams& p);
void assign_pages_cuda(const AssignPagesParams& p, Stream stream);

// An entry of the table, or -1 where the number names none.
SD_HD int32_t entry_of(const PagePool& pool, int32_t number) {
  return number >= 0 && number < pool.num_slots * pool.max_pages ? number : -1;
}

// The page of a source that can have one more owner, or -1.
SD_HD int32_t page_to_share(const PagePool& pool, int32_t src) {
  const int32_t entry = entry_of(pool, src);
  const int32_t page = entry < 0 ? -1 : pool.page_table[entry];
  return is_page(pool, page) && pool.page_refs[page] > 0 && pool.page_refs[page] < INT32_MAX - kMaxAssignments ? page
                                                                                                               : -1;
}

}  // namespace specdec::kv
