// fork_pages: gives empty slots a prefix of other slots' rows. Full pages are shared by reference.
#pragma once

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec::kv {

// Maximum rows per call: one block handles all of them at once, so every row sees the slots as they were before the
// call.
constexpr int64_t kMaxForks = 512;

struct ForkPagesParams {
  PagePool pool;
  const int32_t* src_slots;    // [batch]
  const int32_t* dst_slots;    // [batch]
  const int32_t* prefix_lens;  // [num_slots]: rows that a destination shares with its source
  int32_t* status;             // [num_slots] or null
  int32_t* out_num_rows;       // [batch]: rows to copy to the partial last page, which is the destination's own
  int64_t batch;
};

void fork_pages(CallStream stream, const PoolTensors& tensors, const TensorView& src_slots, const TensorView& dst_slots,
                const TensorView& prefix_lens, const OptTensor& status, const TensorView& out_num_rows);

void fork_pages_cpu(const ForkPagesParams& p);
void fork_pages_cuda(const ForkPagesParams& p, Stream stream);

struct Fork {
  int64_t src, dst;      // dst is -1 for an empty row
  int64_t first = 0;     // first entry that the source has not freed
  int64_t pages = 0;     // end of the full pages, which are shared
  int32_t num_rows = 0;  // rows of the partial page after them, which the destination gets a page for
  int32_t bits = 0;      // for the destination's status: why the fork is refused
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

// Make the destination one more owner of `page`, the source's entry `index`. If it is not a page with an owner, the
// entry stays missing.
SD_HD void share_page(const ForkPagesParams& p, int32_t page, int64_t dst, int64_t index) {
  const PagePool& pool = p.pool;
  const bool valid = is_page(pool, page) && pool.page_refs[page] > 0 && pool.page_refs[page] < INT32_MAX;
  pool.page_table[dst * pool.max_pages + index] = valid ? page : -1;
  if (!valid) return set_status(p.status, dst, kBadPage);
#ifdef __CUDA_ARCH__
  atomicAdd(pool.page_refs + page, 1);
#else
  ++pool.page_refs[page];
#endif
}

}  // namespace specdec::kv
