// alloc_pages: allocates pages for the rows that slots are about to write.
#pragma once

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec::kv {

struct AllocPagesParams {
  PagePool pool;
  const int32_t* seq_lens;  // [num_slots]
  int64_t reserve;          // rows beyond seq_lens
  const int32_t* slots;     // [batch] or null
  int32_t* status;          // [num_slots] or null
  int64_t batch;
};

void alloc_pages(CallStream stream, const PoolTensors& tensors, const TensorView& seq_lens, int64_t reserve,
                 const OptTensor& slots, const OptTensor& status);

void alloc_pages_cpu(const AllocPagesParams& p);
void alloc_pages_cuda(const AllocPagesParams& p, Stream stream);

// Return the pages a slot needs in addition for `rows` rows (0 if it holds enough), or -1 if rows or held are invalid.
SD_HD int64_t pages_to_add(const AllocPagesParams& p, int64_t held, int64_t rows) {
  const int64_t needed = pages_for(p.pool, rows + p.reserve);
  if (held < 0 || rows < 0 || needed > p.pool.max_pages) return -1;
  return needed > held ? needed - held : 0;
}

}  // namespace specdec::kv
