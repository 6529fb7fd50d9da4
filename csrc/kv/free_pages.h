// free_pages: takes back the pages beyond the rows that slots keep.
#pragma once

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec {

struct FreePagesParams {
  PagePool pool;
  const int32_t* keep_lens;  // [num_slots]: rows to keep, 0 for none
  const int32_t* slots;      // [batch] or null
  int32_t* status;           // [num_slots] or null
  int64_t batch;
};

void free_pages(CallStream stream, const TensorView& page_table, const TensorView& page_counts,
                const TensorView& page_refs, const TensorView& free_stack, const TensorView& num_free,
                int64_t page_size, const TensorView& keep_lens, const OptTensor& slots, const OptTensor& status);

void free_pages_cpu(const FreePagesParams& p);
void free_pages_cuda(const FreePagesParams& p, Stream stream);

// The pages a slot keeps of those it holds, or -1 where keep_lens or its count make no sense.
SD_HD int64_t pages_kept(const FreePagesParams& p, int64_t slot) {
  const int64_t held = pages_held(p.pool, slot), rows = p.keep_lens[slot];
  if (held < 0 || rows < 0) return -1;
  const int64_t kept = pages_for(p.pool, rows);
  return kept < held ? kept : held;
}

}  // namespace specdec
