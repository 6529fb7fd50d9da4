// append_draft_backlog: in a round that skips drafting, append the inputs of draft-extend to each slot's ring buffer.
//
// Reads the accepted tokens and the target's features at their nodes. Writes tokens and features into the slot's ring
// and advances its length. draft-extend replays the backlog when drafting resumes.
#pragma once

#include "core/dispatch.h"
#include "core/host_device.h"
#include "core/packed_rows.h"
#include "core/slots.h"

namespace specdec::draft {

struct AppendDraftBacklogParams {
  const int32_t* tokens;        // [batch, accept_width], -1 after the valid ones
  const int32_t* path;          // [batch, accept_width], tree nodes
  const int32_t* num_valid;     // [batch]
  int32_t* backlog_lens;        // [num_slots]: rows ever appended, overwritten ones included
  int32_t* backlog_tokens;      // [num_slots, ring]
  const char* features;         // [batch, num_nodes] or packed [num_rows] rows of row_bytes, or null
  char* backlog_features;       // [num_slots, ring] rows of row_bytes, or null
  const int32_t* slots;         // [batch] or null
  const int32_t* cu_seqlens_q;  // [batch + 1] or null: node i of request b has the packed row cu_seqlens_q[b] + i
  int64_t batch, accept_width, num_nodes, num_rows, ring, num_slots, row_bytes, unit;
};

// Accepted rows `first` to `end` - 1 of one request, which all fit its ring.
struct BacklogRows {
  int64_t b, slot;
  RowRange nodes;
  int64_t first, end;
  uint32_t backlog_lens;  // backlog length before them
};

SD_HD BacklogRows backlog_rows(const AppendDraftBacklogParams& p, int64_t b) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  RowRange nodes{b * p.num_nodes, p.num_nodes};
  if (p.cu_seqlens_q) nodes = packed_rows(p.cu_seqlens_q, b, p.num_rows);
  const bool appends = slot >= 0 && (p.features == nullptr || nodes.count > 0);
  const int64_t end = appends ? clamp_to(int64_t{p.num_valid[b]}, 0, p.accept_width) : 0;
  return {
      b, slot, nodes, end > p.ring ? end - p.ring : 0, end, appends ? static_cast<uint32_t>(p.backlog_lens[slot]) : 0};
}

// Return the ring row, among those of all slots, for accepted row j.
SD_HD int64_t ring_row(const AppendDraftBacklogParams& p, const BacklogRows& r, int64_t j) {
  return r.slot * p.ring + (r.backlog_lens + static_cast<uint32_t>(j)) % static_cast<uint32_t>(p.ring);
}

SD_HD void append_token(const AppendDraftBacklogParams& p, const BacklogRows& r, int64_t j) {
  const int32_t token = p.tokens[r.b * p.accept_width + j];
  p.backlog_tokens[ring_row(p, r, j)] = token > 0 ? token : 0;
}

// Return the features of accepted row j. A node outside the tree is clamped to the nearest one.
SD_HD const char* features_of(const AppendDraftBacklogParams& p, const BacklogRows& r, int64_t j) {
  const int64_t node = clamp_to(int64_t{p.path[r.b * p.accept_width + j]}, 0, r.nodes.count - 1);
  return p.features + (r.nodes.first + node) * p.row_bytes;
}

SD_HD void advance_backlog(const AppendDraftBacklogParams& p, const BacklogRows& r) {
  if (r.end > 0) p.backlog_lens[r.slot] = static_cast<int32_t>(r.backlog_lens + static_cast<uint32_t>(r.end));
}

void append_draft_backlog(CallStream stream, const TensorView& tokens, const TensorView& path,
                          const TensorView& num_valid, const TensorView& backlog_lens, const TensorView& backlog_tokens,
                          const OptTensor& features, const OptTensor& backlog_features, const OptTensor& slots,
                          const OptTensor& cu_seqlens_q);

void append_draft_backlog_cpu(const AppendDraftBacklogParams& p);
void append_draft_backlog_cuda(const AppendDraftBacklogParams& p, Stream stream);

}  // namespace specdec::draft
