// PagePool: page table, reference counts and free stack of a paged KV cache. Shared by alloc_pages, free_pages,
// fork_pages and assign_pages.
#pragma once

#include "core/check.h"
#include "core/host_device.h"
#include "core/slots.h"

namespace specdec::kv {

struct PagePool {
  int32_t* page_table;   // [num_slots, max_pages], -1 for none
  int32_t* page_counts;  // [num_slots]: entries of the slot's row that are in use, from the first
  int32_t* page_starts;  // [num_slots]: the first of them that is still a page; earlier ones were freed
  int32_t* page_refs;    // [num_pages]: owners of each page, 0 if free
  int32_t* free_stack;   // [num_pages]: free page ids, the next one to allocate on top
  int32_t* num_free;     // [1]: height of the stack
  int64_t num_slots, max_pages, num_pages;
  int64_t page_size;
};

// The tensors that callers pass: Python's `PagePool`.
struct PoolTensors {
  const TensorView &page_table, &page_counts, &page_starts, &page_refs, &free_stack, &num_free;
  int64_t page_size;
};

// Check the pool's tensors and return them as a PagePool; binds num_slots.
PagePool check_pool(Check& check, const PoolTensors& pool, Dim& num_slots);

// Return the pages that `rows` rows of KV need.
SD_HD int64_t pages_for(const PagePool& pool, int64_t rows) { return (rows + pool.page_size - 1) / pool.page_size; }

// Return the end of the entries a slot holds, or -1 if its count is out of range.
SD_HD int64_t pages_held(const PagePool& pool, int64_t count) {
  return count >= 0 && count <= pool.max_pages ? count : -1;
}

// Return the first of these entries, clamped.
SD_HD int64_t first_held(int64_t start, int64_t held) { return clamp_to(start, int64_t{0}, held); }

// Return the height of the free stack, clamped.
SD_HD int64_t free_height(const PagePool& pool) { return clamp_to(int64_t{*pool.num_free}, 0, pool.num_pages); }

SD_HD bool is_page(const PagePool& pool, int32_t page) { return page >= 0 && page < pool.num_pages; }

// Put `page`, popped from the stack, into entry `index` of a slot's table. If it is not a page id, the entry stays
// missing and the slot's status gets kBadPage.
SD_HD void put_page(const PagePool& pool, int32_t* status, int32_t page, int64_t slot, int64_t index) {
  const bool valid = is_page(pool, page);
  pool.page_table[slot * pool.max_pages + index] = valid ? page : -1;
  if (valid)
    pool.page_refs[page] = 1;
  else
    set_status(status, slot, kBadPage);
}

// Drop one owner of `page`; push it to the stack if none is left. Return the stack's new height, or -1 if `page` is not
// a page with an owner or the stack is full.
SD_HD int64_t release_page(const PagePool& pool, int32_t page, int64_t height) {
  if (!is_page(pool, page) || pool.page_refs[page] <= 0) return -1;
  if (--pool.page_refs[page] > 0) return height;
  if (height == pool.num_pages) return -1;
  pool.free_stack[height] = page;
  return height + 1;
}

}  // namespace specdec::kv
