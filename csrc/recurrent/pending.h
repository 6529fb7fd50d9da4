// Pending paths and packed rows of the recurrent ops, read the same way on CPU and GPU.
//
// A slot has one committed state and two buffers of records, one record per node of a tree. After verification the
// accepted path is pending: the next pass over the slot folds its records into the state, and writes its own records to
// the other buffer.
#pragma once

#include "core/bits.h"
#include "core/check.h"
#include "core/packed_rows.h"
#include "core/slots.h"

namespace specdec::recurrent {

constexpr int kMaxNodes = 64;   // of a tree: a row of its mask is one word
constexpr int kChunkRows = 16;  // rows of a chain that a pass computes together

struct PendingPathsView {
  const int32_t* nodes;      // [num_slots, path_width]
  const int32_t* num_nodes;  // [num_slots]
  const int32_t* parity;     // [num_slots]: the buffer of records that `nodes` refers to
  const int32_t* slots;      // [batch] or null
  int32_t* status;           // [num_slots] or null
  int64_t batch, num_slots, path_width;
  int64_t record_nodes;  // nodes of a buffer of records
};

// The path that a request's slot has pending.
struct PendingPath {
  int32_t slot = -1;  // -1: an empty row or a stalled slot
  int32_t count = 0, buffer = 0;
  int32_t bits = 0;  // for the slot's status; then nothing is folded
  const int32_t* nodes = nullptr;
};

// The words of a slot. They are loaded together, so that no load waits for another.
struct SlotWords {
  int32_t count = 0, parity = 0, status = 0, prefix = 0;
};

// Load the words of a valid slot; `prefix_lens` may be null.
SD_HD SlotWords load_slot_words(const PendingPathsView& p, const int32_t* prefix_lens, int64_t slot) {
  SlotWords words{.count = p.num_nodes[slot], .parity = p.parity[slot]};
  if (p.status != nullptr) words.status = p.status[slot];
  if (prefix_lens != nullptr) words.prefix = prefix_lens[slot];
  return words;
}

SD_HD PendingPath pending_path(const PendingPathsView& p, int64_t slot, const SlotWords& words) {
  PendingPath path{.slot = words.status & kStalled ? -1 : static_cast<int32_t>(slot),
                   .buffer = words.parity & 1,
                   .nodes = p.nodes + slot * p.path_width};
  if (words.count < 0 || words.count > p.path_width || words.count > p.record_nodes)
    path.bits = kBadLength;
  else
    path.count = words.count;
  return path;
}

SD_HD PendingPath load_pending(const PendingPathsView& p, int64_t b) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  return slot < 0 ? PendingPath{} : pending_path(p, slot, load_slot_words(p, nullptr, slot));
}

// Return whether an entry of a pending path is no node of the records, or does not come after the entry `before` it, -1
// for the first.
SD_HD bool is_bad_entry(const PendingPathsView& p, int32_t node, int32_t before) {
  return node >= p.record_nodes || node <= before;
}
SD_HD bool is_bad_entry(const PendingPathsView& p, const PendingPath& path, int32_t j) {
  return is_bad_entry(p, path.nodes[j], j == 0 ? -1 : path.nodes[j - 1]);
}

// Return the first record of a slot in a buffer, in records: [2, num_slots, record_nodes].
SD_HD int64_t first_record(const PendingPathsView& p, int32_t buffer, int32_t slot) {
  return (buffer * p.num_slots + slot) * p.record_nodes;
}

struct PackedRowsView {
  const int32_t* prefix_lens;  // [num_slots]
  const int32_t* cu_seqlens;   // [batch + 1]
  const int64_t* mask;         // [rows, mask_words] or null: a chain, which is committed
  int64_t rows, mask_words;
};

// A request's rows and its slot's pending path, checked except for the entries of the path and the mask.
struct Request {
  PendingPath path;  // slot -1, or bits: the rows are zeros, and nothing else is read or written
  int32_t first = 0, rows = 0;
  bool fits = true;       // cu_seqlens is what it should be
  bool is_fresh = false;  // the state counts as zeros, and nothing is pending
};

// Return the rows of request b, from `begin` to `end` as cu_seqlens has them, without a path.
SD_HD Request rows_of_request(const PackedRowsView& r, int64_t b, int32_t begin, int32_t end) {
  Request request;
  const int32_t num_rows = static_cast<int32_t>(r.rows);
  request.first = b == 0 ? 0 : clamp_to(begin, 0, num_rows);  // every row has an owner, which writes zeros at least
  request.rows = clamp_to(end, request.first, num_rows) - request.first;
  request.fits = begin == request.first && end == begin + request.rows;
  return request;
}

// Give a request the path of its slot, a valid one.
SD_HD void set_path(Request& request, const PendingPathsView& p, const PackedRowsView& r, int64_t slot,
                    const SlotWords& words) {
  request.path = pending_path(p, slot, words);
  if (request.path.slot < 0) return;
  request.is_fresh = words.prefix == 0;
  if (request.is_fresh) request.path.count = request.path.bits = 0;
  const bool fits = request.fits && words.prefix >= 0;
  if (!fits || (r.mask != nullptr && request.rows > p.record_nodes)) request.path.bits |= kBadLength;
}

// Load request b, 0 to batch. Request `batch` stands for the padding rows after the last request.
SD_HD Request load_request(const PendingPathsView& p, const PackedRowsView& r, int64_t b) {
  const int32_t end = b < p.batch ? r.cu_seqlens[b + 1] : static_cast<int32_t>(r.rows);
  Request request = rows_of_request(r, b, r.cu_seqlens[b], end);
  const int64_t slot = b < p.batch ? slot_of(p.slots, b, p.num_slots) : -1;
  if (slot >= 0) set_path(request, p, r, slot, load_slot_words(p, r.prefix_lens, slot));
  return request;
}

// Return the nodes that row i of a request sees, itself included, as the mask has them.
SD_HD uint64_t mask_word(const PackedRowsView& r, const Request& request, int32_t i) {
  return static_cast<uint64_t>(r.mask[(request.first + i) * r.mask_words]);
}

// Return whether row i of a mask has bits after its first word.
SD_HD bool has_more_bits(const PackedRowsView& r, const Request& request, int32_t i) {
  for (int64_t w = 1; w < r.mask_words; ++w)
    if (r.mask[(request.first + i) * r.mask_words + w] != 0) return true;
  return false;
}

// Return whether the nodes that node i sees are no path in a tree: they are its parent's and itself, and the parent
// comes first. word_of(j) is the word of an earlier node.
template <class Words>
SD_HD bool is_bad_word(uint64_t word, int32_t i, Words&& word_of) {
  const uint64_t ancestors = word & low_bits(i);
  if (word != (ancestors | own_bit(i, 0))) return true;
  return ancestors != 0 && word_of(highest_bit(ancestors)) != ancestors;
}

SD_HD bool is_bad_mask_row(const PackedRowsView& r, const Request& request, int32_t i) {
  return has_more_bits(r, request, i) ||
         is_bad_word(mask_word(r, request, i), i, [&](int32_t j) { return mask_word(r, request, j); });
}

// Return the bits that the entries of a request's path and its mask give, on the host.
inline int32_t bad_tree_bits(const PendingPathsView& p, const PackedRowsView* r, const PendingPath& path,
                             const Request* request) {
  for (int32_t j = 0; j < path.count; ++j)
    if (is_bad_entry(p, path, j)) return kBadTree;
  if (r == nullptr || r->mask == nullptr) return 0;
  for (int32_t i = 0; i < request->rows; ++i)
    if (is_bad_mask_row(*r, *request, i)) return kBadTree;
  return 0;
}

// Arguments that the recurrent ops share.
struct PendingDims {
  Dim slots{"num_slots"}, nodes{"num_nodes"}, width{"accept_width"};

  void check_paths(Check& check, const TensorView& path_nodes, const TensorView& num_nodes, const TensorView& parity) {
    check.tensor("paths.nodes", path_nodes, {slots, width}, kInt32);
    check.tensor("paths.num_nodes", num_nodes, {slots}, kInt32);
    check.tensor("paths.parity", parity, {slots}, kInt32);
    check.range("num_slots", slots, 0, INT32_MAX);
  }

  PendingPathsView view(const TensorView& path_nodes, const TensorView& num_nodes, const TensorView& parity,
                        const OptTensor& slots_of_rows, const OptTensor& status, int64_t batch) const {
    return {.nodes = path_nodes.data<int32_t>(),
            .num_nodes = num_nodes.data<int32_t>(),
            .parity = parity.data<int32_t>(),
            .slots = data_or_null<const int32_t>(slots_of_rows),
            .status = data_or_null<int32_t>(status),
            .batch = batch,
            .num_slots = slots,
            .path_width = width,
            .record_nodes = nodes};
  }
};

// Check the rows of a pass: lengths, offsets, mask, slots and status.
inline void check_rows(Check& check, PendingDims& n, Dim& rows, Dim& batch, Dim& words, const TensorView& prefix_lens,
                       const TensorView& cu_seqlens, const OptTensor& mask, const OptTensor& slots,
                       const OptTensor& status) {
  check.tensor("prefix_lens", prefix_lens, {n.slots}, kInt32);
  check.packed("cu_seqlens", cu_seqlens, batch);
  check.tensor("mask", mask, {rows, words}, kInt64);
  check.that(!mask || words >= 1, "mask", {"has mask_words ", words}, "1 or more");
  check.range("rows", rows, 0, INT32_MAX);
  check.slots(slots, batch, n.slots);
  check.output("status", status, {n.slots}, kInt32);
}

inline PackedRowsView rows_view(const TensorView& prefix_lens, const TensorView& cu_seqlens, const OptTensor& mask,
                                int64_t rows, int64_t words) {
  return {.prefix_lens = prefix_lens.data<int32_t>(),
          .cu_seqlens = cu_seqlens.data<int32_t>(),
          .mask = data_or_null<const int64_t>(mask),
          .rows = rows,
          .mask_words = mask ? words : 0};
}

}  // namespace specdec::recurrent
