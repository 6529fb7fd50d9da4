// free_pages: takes back the pages beyond the rows that slots keep.
#pragma once

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec::kv {

struct FreePagesParams {
  PagePool pool;
  const int32_t* prefix_lens;  // [num_slots]: rows to keep, 0 for none
  const int32_t* slots;        // [batch] or null
  int32_t* status;             // [num_slots] or null
  int64_t batch;
};

void free_pages(CallStream stream, const PoolTensors& tensors, const TensorView& prefix_lens, const OptTensor& slots,
                const OptTensor& status);

void free_pages_cpu(const FreePagesParams& p);
void free_pages_cuda(const FreePagesParams& p, Stream stream);

// The pages a slot keeps of those it holds for `rows`, or -1 where these or what it holds make no sense.
SD_HD int64_t pages_kept(const FreePagesParams& p, int64_t held, int64_t rows) {
  if (held < 0 || rows < 0) return -1;
  const int64_t kept = pages_for(p.pool, rows);
  return kept < held ? kept : held;
}

// Gives back entry `index` of a slot's table; returns the stack's new height.
SD_HD int64_t return_page(const FreePagesParams& p, int64_t slot, int64_t index, int64_t height) {
  const PagePool& pool = p.pool;
  int32_t& entry = pool.page_table[slot * pool.max_pages + index];
  const int32_t page = entry;
  entry = -1;
  if (!is_page(pool, page) || pool.page_refs[page] <= 0) {
    set_status(p.status, slot, kBadPage);
  } else if (--pool.page_refs[page] == 0) {
    if (height < pool.num_pages)
      pool.free_stack[height++] = page;
    else
      set_status(p.status, slot, kBadPage);
  }
  return height;
}

}  // namespace specdec::kv
