// free_pages: frees the pages after the rows that slots keep, or those before a sliding window.
#pragma once

#include <optional>

#include "core/dispatch.h"
#include "kv/pages.h"

namespace specdec::kv {

struct FreePagesParams {
  PagePool pool;
  const int32_t* prefix_lens;  // [num_slots]: rows to keep; with a window, rows of which the last `window` are kept
  int64_t window;              // -1: no window
  const int32_t* slots;        // [batch] or null
  int32_t* status;             // [num_slots] or null
  int64_t batch;
};

void free_pages(CallStream stream, const PoolTensors& tensors, const TensorView& prefix_lens,
                std::optional<int64_t> window, const OptTensor& slots, const OptTensor& status);

void free_pages_cpu(const FreePagesParams& p);
void free_pages_cuda(const FreePagesParams& p, Stream stream);

// The entries that a slot frees, and its page_starts and page_counts afterwards.
struct PagesToFree {
  int64_t first = 0, end = 0;  // freed from the last one to the first
  int64_t start = 0, count = 0;
  bool valid = true;  // false if rows or count are out of range; then nothing changes
};

SD_HD PagesToFree pages_to_free(const FreePagesParams& p, int64_t start, int64_t count, int64_t rows) {
  const int64_t held = pages_held(p.pool, count), first = first_held(start, held < 0 ? 0 : held);
  if (held < 0 || rows < 0) return {.valid = false};
  if (p.window < 0) {
    const int64_t kept = clamp_to(pages_for(p.pool, rows), int64_t{0}, held), begin = kept < first ? first : kept;
    return {.first = begin, .end = held, .start = first < kept ? first : kept, .count = kept};
  }
  const int64_t outside_window = rows > p.window ? (rows - p.window) / p.pool.page_size : 0;
  const int64_t end = clamp_to(outside_window, first, held);
  return {.first = first, .end = end, .start = end, .count = held};
}

// Free entry `index` of a slot's table. Return the stack's new height.
SD_HD int64_t return_page(const FreePagesParams& p, int64_t slot, int64_t index, int64_t height) {
  const PagePool& pool = p.pool;
  int32_t& entry = pool.page_table[slot * pool.max_pages + index];
  const int64_t freed = release_page(pool, entry, height);
  entry = -1;
  if (freed >= 0) return freed;
  set_status(p.status, slot, kBadPage);
  return height;
}

}  // namespace specdec::kv
