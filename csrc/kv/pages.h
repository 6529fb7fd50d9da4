// The page pool: which pages are free, and which slot holds which. Shared by alloc_pages, free_pages, fork_pages and
// assign_pages.
#pragma once

#include "core/check.h"
#include "core/host_device.h"
#include "core/slots.h"

namespace specdec::kv {

struct PagePool {
  int32_t* page_table;   // [num_slots, max_pages], -1 for none
  int32_t* page_counts;  // [num_slots]: entries of the slot's row that it got, the first ones
  int32_t* page_starts;  // [num_slots]: the first of them that is still a page; those before were given back
  int32_t* page_refs;    // [num_pages]: owners of each page, 0 when free
  int32_t* free_stack;   // [num_pages]: free page ids, the next one to give away on top
  int32_t* num_free;     // [1]: height of the stack
  int64_t num_slots, max_pages, num_pages;
  int64_t page_size;
};

// What callers pass: `PagePool` of ops.py.
struct PoolTensors {
  const TensorView &page_table, &page_counts, &page_starts, &page_refs, &free_stack, &num_free;
  int64_t page_size;
};

// Checks the pool's tensors and gathers them; binds num_slots.
PagePool check_pool(Check& check, const PoolTensors& pool, Dim& num_slots);

// Pages that `rows` rows of KV need.
SD_HD int64_t pages_for(const PagePool& pool, int64_t rows) { return (rows + pool.page_size - 1) / pool.page_size; }

// The end of the entries a slot holds by its count, or -1 where that is not one.
SD_HD int64_t pages_held(const PagePool& pool, int64_t count) {
  return count >= 0 && count <= pool.max_pages ? count : -1;
}

// The first of these entries, in bounds whatever the word says.
SD_HD int64_t first_held(int64_t start, int64_t held) { return clamp_to(start, int64_t{0}, held); }

// Height of the free stack, in bounds whatever the word says.
SD_HD int64_t free_height(const PagePool& pool) { return clamp_to(int64_t{*pool.num_free}, 0, pool.num_pages); }

SD_HD bool is_page(const PagePool& pool, int32_t page) { return page >= 0 && page < pool.num_pages; }

// Makes `page`, from the stack, entry `index` of a slot's table. It may not be a page: then the entry stays missing,
// and whoever needs the row says so.
SD_HD void put_page(const PagePool& pool, int32_t* status, int32_t page, int64_t slot, int64_t index) {
  const bool sound = is_page(pool, page);
  pool.page_table[slot * pool.max_pages + index] = sound ? page : -1;
  if (sound)
    pool.page_refs[page] = 1;
  else
    set_status(status, slot, kBadPage);
}

// Takes one owner off `page`; without any left it goes on the stack. Returns the stack's new height, or -1 where this
// is no page with an owner, or the stack has no room.
SD_HD int64_t drop_owner(const PagePool& pool, int32_t page, int64_t height) {
  if (!is_page(pool, page) || pool.page_refs[page] <= 0) return -1;
  if (--pool.page_refs[page] > 0) return height;
  if (height == pool.num_pages) return -1;
  pool.free_stack[height] = page;
  return height + 1;
}

}  // namespace specdec::kv
