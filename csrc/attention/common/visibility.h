// Define which KV rows a query row attends to and where they are stored; used by both the CPU and the CUDA kernels.
#pragma once

#include "attention/attention_call.h"
#include "core/bits.h"
#include "core/host_device.h"
#include "core/slots.h"

namespace specdec::attention {

// A request's lengths as read from the device, clamped into bounds.
struct Request {
  int64_t flat_row;    // its first row in mask and lse
  int64_t q_start;     // offset of its first element in q
  int64_t out_start;   // offset of its first element in out
  int32_t slot;        // -1: empty or stalled; every row is zero
  int32_t rows;        // rows to write
  int32_t valid_rows;  // the first of them, which attend; the others are zero
  int32_t prefix;      // KV rows [0, prefix) are visible to all rows
  int32_t end;         // KV rows [prefix, end) are the tail, visible to some row; nothing past them is read
  int32_t shift;       // causal chain: row i attends to tail rows j <= i + shift
  int32_t status;

  bool operator==(const Request&) const = default;
};

// Return x + y, saturated at INT32_MAX.
SD_HD int32_t add_clamped(int32_t x, int32_t y) {
  return static_cast<int32_t>(clamp_to(int64_t{x} + y, INT32_MIN, INT32_MAX));
}

// Load past the L1: kernels read lengths before the preceding kernels have finished, and again afterwards.
SD_HD int32_t load_past_l1(const int32_t* x) {
#ifdef __CUDA_ARCH__
  return __ldcg(x);
#else
  return *x;
#endif
}

// Read request b, 0 to batch - 1. With packed rows, request `batch` stands for the padding rows after the last request,
// which are zeroed. Issue all independent loads first, so that their latencies overlap.
SD_HD Request load_request(const AttentionCall& p, int64_t b) {
  Request r{};
  const int32_t q_rows = static_cast<int32_t>(p.q_rows);
  const bool packed = p.cu_seqlens_q != nullptr;
  r.slot = b < p.batch ? p.slots ? load_past_l1(p.slots + b) : static_cast<int32_t>(b) : -1;
  if (r.slot >= p.num_slots) r.slot = -1;
  const int32_t begin = packed ? load_past_l1(p.cu_seqlens_q + b) : 0;
  const int32_t stop = packed     ? (b < p.batch ? load_past_l1(p.cu_seqlens_q + b + 1) : q_rows)
                       : p.q_lens ? load_past_l1(p.q_lens + b)
                                  : q_rows;
  const int32_t prefix = r.slot >= 0 ? load_past_l1(p.prefix_lens + r.slot) : 0;
  if (r.slot >= 0 && p.status != nullptr && (load_past_l1(p.status + r.slot) & kStalled)) r.slot = -1;

  const int32_t first = clamp_to(begin, 0, q_rows), last = clamp_to(stop, first, q_rows);
  r.valid_rows = last - first;
  r.rows = packed ? r.valid_rows : q_rows;
  r.flat_row = packed ? first : b * q_rows;
  r.q_start = packed ? first * p.q_strides.row : b * p.q_strides.batch;
  r.out_start = packed ? first * p.out_strides.row : b * p.out_strides.batch;
  if (begin != first || stop != last) r.status |= kBadLength;
  if (r.slot < 0 || r.valid_rows == 0) return r;

  const bool own_tail = p.tail_len < 0;
  const int32_t tail = own_tail ? r.valid_rows : static_cast<int32_t>(p.tail_len);
  r.shift = own_tail ? 0 : tail - r.rows;
  const int32_t visible = p.mask ? tail : clamp_to(add_clamped(r.valid_rows, r.shift), 0, tail);
  if (p.mask && tail > 64 * p.mask_words) r.status |= kBadLength;

  const int32_t capacity = static_cast<int32_t>(p.max_kv_len),
                end = add_clamped(clamp_to(prefix, 0, capacity), visible);
  r.prefix = clamp_to(prefix, 0, capacity);
  r.end = clamp_to(end, 0, capacity);
  if (r.prefix != prefix || r.end != end) r.status |= kBadLength;
  return r;
}

// Return the end of the KV rows visible to query rows 0 to i.
SD_HD int32_t visible_end(const AttentionCall& p, const Request& r, int32_t i) {
  return p.mask ? r.end : clamp_to(add_clamped(r.prefix, clamp_to(add_clamped(i + 1, r.shift), 0, r.end)), 0, r.end);
}

// Return the number of tail rows visible to query row i by the mask or the causal chain, before the window. The prefix
// and these rows are the row's path; the window keeps the last rows of the path.
SD_HD int32_t visible_tail_rows(const AttentionCall& p, const Request& r, int32_t i) {
  if (p.mask == nullptr) return visible_end(p, r, i) - r.prefix;
  int32_t visible = 0;
  for (int64_t w = 0; w < p.mask_words && 64 * w < r.end - r.prefix; ++w)
    visible += count_bits(static_cast<uint64_t>(p.mask[(r.flat_row + i) * p.mask_words + w]) &
                          low_bits(r.end - r.prefix - 64 * w));
  return visible;
}

// Return the first KV row visible to query rows from i on.
SD_HD int32_t visible_begin(const AttentionCall& p, const Request& r, int32_t i) {
  if (p.window == INT64_MAX) return 0;
  return static_cast<int32_t>(clamp_to((p.mask ? r.prefix : visible_end(p, r, i)) - p.window, 0, r.end));
}

// KV rows [all_visible_begin(j), all_visible_end(i)) are visible to every query row from i to j, as far as they are on
// a valid page. Only a causal chain extends this range past the prefix.
SD_HD int64_t all_visible_begin(const AttentionCall& p, const Request& r, int32_t j) {
  return p.window == INT64_MAX ? 0 : (p.mask ? r.end : visible_end(p, r, j)) - p.window;
}
SD_HD int32_t all_visible_end(const AttentionCall& p, const Request& r, int32_t i) {
  return p.mask ? r.prefix : visible_end(p, r, i);
}

// Return a mask: bit j is set if query row i of the request attends to KV row first + j.
SD_HD uint64_t visible_word(const AttentionCall& p, const Request& r, int32_t i, int64_t first) {
  uint64_t visible = low_bits(visible_end(p, r, i) - first);
  const int64_t tail = first - r.prefix;  // position of bit 0 in the tail
  if (p.mask != nullptr && p.mask_words == 1 && p.window == INT64_MAX) {
    // Fast path for the common case: one mask word and no window.
    if (tail <= -64) return visible;
    const uint64_t word = static_cast<uint64_t>(p.mask[r.flat_row + i]);
    return visible & (tail < 0 ? low_bits(-tail) | word << -tail : tail < 64 ? word >> tail : 0);
  }
  // The window hides the oldest `outside` rows of the path: first rows of the prefix, then rows of the tail.
  int64_t outside = p.window == INT64_MAX ? 0 : int64_t{r.prefix} + visible_tail_rows(p, r, i) - p.window;
  visible &= ~low_bits((p.mask ? clamp_to(outside, INT64_MIN, r.prefix) : outside) - first);
  if (p.mask == nullptr || tail <= -64) return visible;
  const int64_t* words = p.mask + (r.flat_row + i) * p.mask_words;
  uint64_t by_mask = low_bits(-tail);
  for (int64_t w = 0; w < p.mask_words; ++w) {
    uint64_t word = static_cast<uint64_t>(words[w]);
    for (outside -= w == 0 ? r.prefix : 0; outside > 0 && word != 0; --outside) word &= word - 1;
    const int64_t shift = 64 * w - tail;  // position of the word's bit 0 in the result
    if (shift > -64 && shift < 64) by_mask |= shift >= 0 ? word << shift : word >> -shift;
  }
  return visible & by_mask;
}

// Return whether every query row of the request attends to all KV rows first + j whose bit j of `tokens` is set.
SD_HD bool all_visible(const AttentionCall& p, const Request& r, int64_t first, uint64_t tokens) {
  return p.window == INT64_MAX && (tokens & ~low_bits(r.prefix - first)) == 0;
}

// Return where a head of a KV row begins in its pool, in elements.
SD_HD int64_t row_start(const PoolStrides& strides, kv::KvRow at, int64_t head) {
  return at.page * strides.page + at.offset * strides.row + head * strides.head;
}

}  // namespace specdec::attention
