// WorkItem: what one block of the general kernels computes, found on the device, which alone knows the lengths.
#pragma once

#include <cutlass/fast_math.h>

#include "attention/plain/row_blocks.cuh"
#include "core/packed_rows.h"
#include "mla/visible_rows.h"

namespace specdec::mla {

// Up to a row tile of rows that read the same KV. Row n of a request is head n % q_heads of its query row n / q_heads.
// With index lists an item has rows of one query row, and its "KV rows" are the entries of the list.
struct WorkItem {
  Request request;
  int begin;         // first row
  int count, valid;  // rows to write; the first of them that attend
  int kv_begin, kv_end;
  int32_t end_listed;  // index lists: end of the rows that they may name
};

// Return the blocks of a call, an upper bound if rows are packed.
inline int64_t count_items(const MlaTreeAttentionParams& p, int tile_rows) {
  if (p.indices == nullptr) return attention::count_row_blocks(p, tile_rows);
  return (p.cu_seqlens_q ? 1 : p.batch) * p.q_rows * ((p.q_heads + tile_rows - 1) / tile_rows);
}

// Find the item of a query row's heads from `head` on, with index lists.
__device__ inline WorkItem find_listed_item(const MlaTreeAttentionParams& p, int tile_rows, int64_t row, int head) {
  WorkItem item{};
  Request& r = item.request;
  int64_t b = row / p.q_rows, i = row - b * p.q_rows;
  if (p.cu_seqlens_q != nullptr) {
    b = request_of_row(p.cu_seqlens_q, p.batch, row);
    if (b >= 0) r = load_request(p, b);
    i = row - r.flat_row;
    if (b < 0 || i < 0 || i >= r.rows) {  // after the last request, or between malformed ones
      r = Request{.flat_row = row, .q_start = 0, .out_start = row * p.out_strides.row, .slot = -1, .rows = 1};
      i = 0;
    }
  } else {
    r = load_request(p, b);
  }
  const int heads = static_cast<int>(p.q_heads);
  item.begin = static_cast<int>(i) * heads + head;
  item.count = min(tile_rows, heads - head);
  item.valid = i < r.valid_rows && r.slot >= 0 ? item.count : 0;
  item.kv_end = item.valid > 0 ? static_cast<int>(p.num_indices) : 0;
  item.end_listed = item.valid > 0 ? listed_end(p, r) : 0;
  return item;
}

// Find the item of block x, and report the status of its request. Call from all threads; an item with count 0 is
// nothing to do.
__device__ inline WorkItem find_item(const MlaTreeAttentionParams& p, int tile_rows, int64_t x) {
  if (p.indices != nullptr) {
    if (x == 0)
      for (int64_t b = threadIdx.x; b < p.batch; b += blockDim.x) {
        const Request r = load_request(p, b);
        if (r.status != 0) set_status(p.status, r.slot, r.status);
      }
    const int tiles = (static_cast<int>(p.q_heads) + tile_rows - 1) / tile_rows;
    return find_listed_item(p, tile_rows, x / tiles, static_cast<int>(x % tiles) * tile_rows);
  }
  const auto [b, begin] = attention::find_row_block(p, tile_rows, x);
  WorkItem item{};
  if (b < 0) return item;
  Request& r = item.request;
  r = load_request(p, b);
  if (begin == 0 && threadIdx.x == 0 && r.status != 0) set_status(p.status, r.slot, r.status);
  const int heads = static_cast<int>(p.q_heads);
  item.begin = static_cast<int>(begin);
  item.count = max(static_cast<int>(min(int64_t{r.rows} * heads - begin, int64_t{tile_rows})), 0);
  item.valid =
      r.slot < 0 ? 0 : max(static_cast<int>(min(int64_t{r.valid_rows} * heads - begin, int64_t{tile_rows})), 0);
  if (item.valid > 0) {
    item.kv_begin = visible_begin(p, r, item.begin / heads);
    item.kv_end = max(item.kv_begin, visible_end(p, r, (item.begin + item.valid - 1) / heads));
  }
  return item;
}

// Return where KV row (or list entry) k of an item is stored, or null if there is no such row; a bad page or entry sets
// the request's status.
__device__ inline const char* find_latent_row(const MlaTreeAttentionParams& p, const WorkItem& item,
                                              const cutlass::FastDivmod& page_size, int k) {
  if (k < item.kv_begin || k >= item.kv_end) return nullptr;
  const Request& r = item.request;
  int row = k, bits = 0;
  if (p.indices != nullptr) row = listed_row(p, r, item.end_listed, item.begin / static_cast<int>(p.q_heads), k, bits);
  const char* address = nullptr;
  if (row >= 0) {
    const kv::KvRow at = find_row(p.rows, page_size, r.slot, row);
    bits |= at.bits;
    if (at.bits == 0) address = row_address(p, at);
  }
  if (bits != 0) set_status(p.status, r.slot, bits);
  return address;
}

// Return whether some row of the item may not see all KV rows from `first` on, `tokens` of them.
__device__ inline bool needs_mask(const MlaTreeAttentionParams& p, const WorkItem& item, int first, int tokens) {
  return p.indices == nullptr && (first + tokens > item.request.prefix || p.window != INT64_MAX);
}

// Return a mask: bit j is set if row n of the item sees KV row first + j, where needs_mask().
__device__ inline uint64_t visible_to_row(const MlaTreeAttentionParams& p, const WorkItem& item, int n, int first) {
  return visible_word(p, item.request, (item.begin + n) / static_cast<int>(p.q_heads), first);
}

}  // namespace specdec::mla
