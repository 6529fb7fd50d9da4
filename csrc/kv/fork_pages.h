// fork_pages: gives empty slots the first rows of other slots, by reference as far as whole pages go.
#pragma once

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec::kv {

// Rows of a call at most: one block does them all at once, so that every row sees the slots as they were before it.
constexpr int64_t kMaxForks = 512;

struct ForkPagesParams {
  PagePool pool;
  const int32_t* src_slots;    // [batch]
  const int32_t* dst_slots;    // [batch]
  const int32_t* prefix_lens;  // [num_slots]: rows that a destination shares with its source
  int32_t* status;             // [num_slots] or null
  int32_t* out_num_rows;       // [batch]: rows of the last page, when it is a page of the destination's own
  int64_t batch;
};

void fork_pages(CallStream stream, const PoolTensors& tensors, const TensorView& src_slots, const TensorView& dst_slots,
                const TensorView& prefix_lens, const OptTensor& status, const TensorView& out_num_rows);

void fork_pages_cpu(const ForkPagesParams& p);
void fork_pages_cuda(const ForkPagesParams& p, Stream stream);

struct Fork {
  int64_t src, dst;      // dst is -1 for an empty row
  int64_t first = 0;     // entry before which the source has given back its pages
  int64_t pages = 0;     // end of the whole ones, to be shared
  int32_t num_rows = 0;  // of the partial page behind them, which becomes a page of its own
  int32_t bits = 0;      // for the destination's status: why there is no such fork
};

SD_HD Fork find_fork(const ForkPagesParams& p, int64_t b) {
  Fork fork{.src = slot_of(p.src_slots, b, p.pool.num_slots), .dst = slot_of(p.dst_slots, b, p.pool.num_slots)};
  if (fork.src < 0) fork.dst = -1;
  if (fork.dst < 0) return fork;
  const int64_t len = p.prefix_lens[fork.dst], held = pages_held(p.pool, p.pool.page_counts[fork.src]);
  if (p.pool.page_counts[fork.dst] != 0 || len < 0 || pages_for(p.pool, len) > held) {
    fork.bits = kBadLength;
    return fork;
  }
  fork.pages = len / p.pool.page_size;
  fork.first = first_held(p.pool.page_starts[fork.src], fork.pages);
  fork.num_rows = static_cast<int32_t>(len % p.pool.page_size);
  return fork;
}

// Makes the destination one more owner of `page`, the source's entry `index`. What is no page with an owner cannot be
// shared: the entry stays missing.
SD_HD void share_page(const ForkPagesParams& p, int32_t page, int64_t dst, int64_t index) {
  const PagePool& pool = p.pool;
  const bool sound = is_page(pool, page) && pool.page_refs[page] > 0 && pool.page_refs[page] < INT32_MAX;
  pool.page_table[dst * pool.max_pages + index] = sound ? page : -1;
  if (!sound) return set_status(p.status, dst, kBadPage);
#ifdef __CUDA_ARCH__
  atomicAdd(pool.page_refs + page, 1);
#else
  ++pool.page_refs[page];
#endif
}

}  // namespace specdec::kv
