// Which KV rows a query row sees and where they are: one definition for both devices.
#pragma once

#include "attention/tree_attention.h"
#include "core/bits.h"
#include "core/slots.h"

namespace specdec {

// One request of the call, its device-side lengths read and brought into bounds.
struct Request {
  int64_t slot;        // -1: empty or stalled, every row gives zeros
  int64_t flat_row;    // its first row in mask and lse
  int64_t q_start;     // its first element in q
  int64_t out_start;   // its first element in out
  int64_t rows;        // rows to write
  int64_t valid_rows;  // of those, the first ones, which attend; the others give zeros
  int64_t prefix;      // KV rows [0, prefix) are visible to all
  int64_t end;         // KV rows [prefix, end) are the tail that some row may see; nothing beyond is read
  int64_t shift;       // causal chain: row i sees tail rows j <= i + shift
  int32_t status;
};

SD_HD int64_t clamp_to(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// Requests 0 to batch - 1, and for packed rows one more: the rows behind the last request, which give zeros.
SD_HD Request request_of(const TreeAttentionParams& p, int64_t b) {
  Request r{};
  r.slot = b < p.batch ? slot_of(p.slots, b, p.num_slots) : -1;
  if (r.slot >= 0 && p.status != nullptr && (p.status[r.slot] & kStalled)) r.slot = -1;
  if (p.cu_seqlens_q != nullptr) {
    const int64_t begin = p.cu_seqlens_q[b], stop = b < p.batch ? p.cu_seqlens_q[b + 1] : p.q_rows;
    r.flat_row = clamp_to(begin, 0, p.q_rows);
    r.rows = clamp_to(stop, r.flat_row, p.q_rows) - r.flat_row;
    r.valid_rows = r.rows;
    r.q_start = r.flat_row * p.q_strides.row;
    r.out_start = r.flat_row * p.out_strides.row;
    if (begin != r.flat_row || stop != r.flat_row + r.rows) r.status |= kBadLength;
  } else {
    const int64_t wanted = p.q_lens ? p.q_lens[b] : p.q_rows;
    r.flat_row = b * p.q_rows;
    r.rows = p.q_rows;
    r.valid_rows = clamp_to(wanted, 0, p.q_rows);
    r.q_start = b * p.q_strides.batch;
    r.out_start = b * p.out_strides.batch;
    if (wanted != r.valid_rows) r.status |= kBadLength;
  }
  if (r.slot < 0 || r.valid_rows == 0) return r;

  const bool own_tail = p.tail_len < 0;
  const int64_t tail = own_tail ? r.valid_rows : p.tail_len;
  r.shift = own_tail ? 0 : tail - (p.cu_seqlens_q ? r.valid_rows : p.q_rows);
  const int64_t seen = p.mask ? tail : clamp_to(r.valid_rows + r.shift, 0, tail);
  if (p.mask && tail > 64 * p.mask_words) r.status |= kBadLength;

  const int64_t capacity = row_capacity(p.rows), prefix = p.prefix_lens[r.slot];
  r.prefix = clamp_to(prefix, 0, capacity);
  r.end = clamp_to(r.prefix + seen, 0, capacity);
  if (r.prefix != prefix || r.end != prefix + seen) r.status |= kBadLength;
  return r;
}

// The end of the KV rows that rows 0 to i may see.
SD_HD int64_t visible_end(const TreeAttentionParams& p, const Request& r, int64_t i) {
  return p.mask ? r.end : clamp_to(r.prefix + clamp_to(i + r.shift + 1, 0, r.end), 0, r.end);
}

// Tail rows that row i sees by the mask or the chain; with the prefix they are its path, of which it sees the window.
SD_HD int64_t tail_rows_seen(const TreeAttentionParams& p, const Request& r, int64_t i) {
  if (p.mask == nullptr) return visible_end(p, r, i) - r.prefix;
  int64_t seen = 0;
  for (int64_t w = 0; w < p.mask_words && 64 * w < r.end - r.prefix; ++w)
    seen += count_bits(static_cast<uint64_t>(p.mask[(r.flat_row + i) * p.mask_words + w]) &
                       low_bits(r.end - r.prefix - 64 * w));
  return seen;
}

// No row from i on sees KV rows before this one.
SD_HD int64_t visible_begin(const TreeAttentionParams& p, const Request& r, int64_t i) {
  if (p.window == INT64_MAX) return 0;
  return clamp_to((p.mask ? r.prefix : visible_end(p, r, i)) - p.window, 0, r.end);
}

// Bit j: row i of the request sees KV row first + j.
SD_HD uint64_t visible_word(const TreeAttentionParams& p, const Request& r, int64_t i, int64_t first) {
  uint64_t seen = low_bits(visible_end(p, r, i) - first);
  const int64_t tail = first - r.prefix;  // of bit 0
  // Rows of the path that lie before the window, oldest first: of the prefix, then of the tail.
  int64_t outside = p.window == INT64_MAX ? 0 : r.prefix + tail_rows_seen(p, r, i) - p.window;
  seen &= ~low_bits((p.mask ? clamp_to(outside, INT64_MIN, r.prefix) : outside) - first);
  if (p.mask == nullptr || tail <= -64) return seen;
  const int64_t* words = p.mask + (r.flat_row + i) * p.mask_words;
  uint64_t by_mask = low_bits(-tail);
  for (int64_t w = 0; w < p.mask_words; ++w) {
    uint64_t word = static_cast<uint64_t>(words[w]);
    for (outside -= w == 0 ? r.prefix : 0; outside > 0 && word != 0; --outside) word &= word - 1;
    const int64_t shift = 64 * w - tail;  // of its bit 0 in the result
    if (shift > -64 && shift < 64) by_mask |= shift >= 0 ? word << shift : word >> -shift;
  }
  return seen & by_mask;
}

// Where a head of a KV row begins in its pool, in elements.
SD_HD int64_t row_start(const PoolStrides& strides, KvRow at, int64_t head) {
  return at.page * strides.page + at.offset * strides.row + head * strides.head;
}

}  // namespace specdec
