// alloc_pages: tops slots' page tables up to the rows they are about to write.
#pragma once

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec {

struct AllocPagesParams {
  PagePool pool;
  const int32_t* lens;   // [num_slots]
  int64_t reserve;       // rows beyond lens
  const int32_t* slots;  // [batch] or null
  int32_t* status;       // [num_slots] or null
  int64_t batch;
};

void alloc_pages(CallStream stream, const TensorView& page_table, const TensorView& page_counts,
                 const TensorView& page_refs, const TensorView& free_stack, const TensorView& num_free,
                 int64_t page_size, const TensorView& lens, int64_t reserve, const OptTensor& slots,
                 const OptTensor& status);

void alloc_pages_cpu(const AllocPagesParams& p);
void alloc_pages_cuda(const AllocPagesParams& p, Stream stream);

// The pages a slot lacks (0 when it holds enough), or -1 where lens or its count make no sense.
SD_HD int64_t pages_lacking(const AllocPagesParams& p, int64_t slot) {
  const int64_t held = pages_held(p.pool, slot), rows = p.lens[slot];
  const int64_t wanted = pages_for(p.pool, rows + p.reserve);
  if (held < 0 || rows < 0 || wanted > p.pool.max_pages) return -1;
  return wanted > held ? wanted - held : 0;
}

// Gives the slot's i-th lacking page, taken from a stack of `height`. What is on the stack may not be a page: then the
// entry stays missing, and whoever needs the row says so.
SD_HD void give_page(const AllocPagesParams& p, int64_t slot, int64_t held, int64_t height, int64_t i) {
  const int32_t page = p.pool.free_stack[height - 1 - i];
  const bool sound = is_page(p.pool, page);
  p.pool.page_table[slot * p.pool.max_pages + held + i] = sound ? page : -1;
  if (sound)
    p.pool.page_refs[page] = 1;
  else
    set_status(p.status, slot, kBadPage);
}

}  // namespace specdec
