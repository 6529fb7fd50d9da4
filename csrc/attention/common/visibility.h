// Which KV rows a query row sees, and where they are: one definition for both devices.
#pragma once

#include "attention/tree_attention.h"
#include "core/bits.h"
#include "core/host_device.h"
#include "core/slots.h"

namespace specdec::attention {

// One request of the call: its lengths as they are on the device, clamped into bounds.
struct Request {
  int64_t flat_row;    // its first row in mask and lse
  int64_t q_start;     // its first element in q
  int64_t out_start;   // its first element in out
  int32_t slot;        // -1: empty or stalled, every row gives zeros
  int32_t rows;        // rows to write
  int32_t valid_rows;  // the first of them, which attend; the others give zeros
  int32_t prefix;      // KV rows [0, prefix) are visible to all
  int32_t end;         // KV rows [prefix, end) are the tail that some row may see; nothing beyond is read
  int32_t shift;       // causal chain: row i sees tail rows j <= i + shift
  int32_t status;

  bool operator==(const Request&) const = default;
};

// x + y, or the highest int32 where that is less.
SD_HD int32_t add_clamped(int32_t x, int32_t y) {
  return static_cast<int32_t>(clamp_to(int64_t{x} + y, INT32_MIN, INT32_MAX));
}

// Reads past the L1: kernels look at lengths before the kernels before them have finished, and again afterwards.
SD_HD int32_t fresh(const int32_t* x) {
#ifdef __CUDA_ARCH__
  return __ldcg(x);
#else
  return *x;
#endif
}

// Reads request b of 0 to batch - 1, or for packed rows request `batch`: the rows behind the last one, which give
// zeros. What has to be loaded is loaded first, so that the loads wait together.
SD_HD Request request_of(const TreeAttentionParams& p, int64_t b) {
  Request r{};
  const int32_t q_rows = static_cast<int32_t>(p.q_rows);
  const bool packed = p.cu_seqlens_q != nullptr;
  r.slot = b < p.batch ? p.slots ? fresh(p.slots + b) : static_cast<int32_t>(b) : -1;
  if (r.slot >= p.num_slots) r.slot = -1;
  const int32_t begin = packed ? fresh(p.cu_seqlens_q + b) : 0;
  const int32_t stop = packed     ? (b < p.batch ? fresh(p.cu_seqlens_q + b + 1) : q_rows)
                       : p.q_lens ? fresh(p.q_lens + b)
                                  : q_rows;
  const int32_t prefix = r.slot >= 0 ? fresh(p.prefix_lens + r.slot) : 0;
  if (r.slot >= 0 && p.status != nullptr && (fresh(p.status + r.slot) & kStalled)) r.slot = -1;

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
  const int32_t seen = p.mask ? tail : clamp_to(add_clamped(r.valid_rows, r.shift), 0, tail);
  if (p.mask && tail > 64 * p.mask_words) r.status |= kBadLength;

  const int32_t capacity = static_cast<int32_t>(p.max_kv_len), end = add_clamped(clamp_to(prefix, 0, capacity), seen);
  r.prefix = clamp_to(prefix, 0, capacity);
  r.end = clamp_to(end, 0, capacity);
  if (r.prefix != prefix || r.end != end) r.status |= kBadLength;
  return r;
}

// The end of the KV rows that query rows 0 to i may see.
SD_HD int32_t visible_end(const TreeAttentionParams& p, const Request& r, int32_t i) {
  return p.mask ? r.end : clamp_to(add_clamped(r.prefix, clamp_to(add_clamped(i + 1, r.shift), 0, r.end)), 0, r.end);
}

// The tail rows that query row i sees by the mask or the chain. With the prefix they are its path, of which it sees the
// window.
SD_HD int32_t tail_rows_seen(const TreeAttentionParams& p, const Request& r, int32_t i) {
  if (p.mask == nullptr) return visible_end(p, r, i) - r.prefix;
  int32_t seen = 0;
  for (int64_t w = 0; w < p.mask_words && 64 * w < r.end - r.prefix; ++w)
    seen += count_bits(static_cast<uint64_t>(p.mask[(r.flat_row + i) * p.mask_words + w]) &
                       low_bits(r.end - r.prefix - 64 * w));
  return seen;
}

// The first KV row that query rows from i on may see.
SD_HD int32_t visible_begin(const TreeAttentionParams& p, const Request& r, int32_t i) {
  if (p.window == INT64_MAX) return 0;
  return static_cast<int32_t>(clamp_to((p.mask ? r.prefix : visible_end(p, r, i)) - p.window, 0, r.end));
}

// All query rows from i to j see the KV rows from shared_begin(j) to shared_end(i), as far as these are on a page.
// Behind the prefix that is so of a causal chain alone.
SD_HD int64_t shared_begin(const TreeAttentionParams& p, const Request& r, int32_t j) {
  return p.window == INT64_MAX ? 0 : (p.mask ? r.end : visible_end(p, r, j)) - p.window;
}
SD_HD int32_t shared_end(const TreeAttentionParams& p, const Request& r, int32_t i) {
  return p.mask ? r.prefix : visible_end(p, r, i);
}

// Bit j: query row i of the request sees KV row first + j.
SD_HD uint64_t visible_word(const TreeAttentionParams& p, const Request& r, int32_t i, int64_t first) {
  uint64_t seen = low_bits(visible_end(p, r, i) - first);
  const int64_t tail = first - r.prefix;  // where bit 0 is in the tail
  if (p.mask != nullptr && p.mask_words == 1 && p.window == INT64_MAX) {
    // The common case of what follows, in few instructions: most trees have one mask word, and no window.
    if (tail <= -64) return seen;
    const uint64_t word = static_cast<uint64_t>(p.mask[r.flat_row + i]);
    return seen & (tail < 0 ? low_bits(-tail) | word << -tail : tail < 64 ? word >> tail : 0);
  }
  // The rows of the path that lie before the window, oldest first: first those of the prefix, then those of the tail.
  int64_t outside = p.window == INT64_MAX ? 0 : int64_t{r.prefix} + tail_rows_seen(p, r, i) - p.window;
  seen &= ~low_bits((p.mask ? clamp_to(outside, INT64_MIN, r.prefix) : outside) - first);
  if (p.mask == nullptr || tail <= -64) return seen;
  const int64_t* words = p.mask + (r.flat_row + i) * p.mask_words;
  uint64_t by_mask = low_bits(-tail);
  for (int64_t w = 0; w < p.mask_words; ++w) {
    uint64_t word = static_cast<uint64_t>(words[w]);
    for (outside -= w == 0 ? r.prefix : 0; outside > 0 && word != 0; --outside) word &= word - 1;
    const int64_t shift = 64 * w - tail;  // where its bit 0 is in the result
    if (shift > -64 && shift < 64) by_mask |= shift >= 0 ? word << shift : word >> -shift;
  }
  return seen & by_mask;
}

// Whether every query row of the request sees all KV rows first + j for which bit j of `there` is set.
SD_HD bool all_see(const TreeAttentionParams& p, const Request& r, int64_t first, uint64_t there) {
  return p.window == INT64_MAX && (there & ~low_bits(r.prefix - first)) == 0;
}

// Where a head of a KV row begins in its pool, in elements.
SD_HD int64_t row_start(const PoolStrides& strides, kv::KvRow at, int64_t head) {
  return at.page * strides.page + at.offset * strides.row + head * strides.head;
}

}  // namespace specdec::attention
