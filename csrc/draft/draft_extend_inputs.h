// draft_extend_inputs: turn the tokens that a round accepted into the inputs of the draft's forward pass over them
// (draft-extend).
#pragma once

#include "core/dispatch.h"
#include "core/host_device.h"
#include "core/packed_rows.h"
#include "core/slots.h"

namespace specdec::draft {

struct DraftExtendInputsParams {
  const int32_t* tokens;        // [batch, accept_width], -1 after the valid ones
  const int32_t* path;          // [batch, accept_width], tree nodes
  const int32_t* num_valid;     // [batch]
  const int32_t* prefix_lens;   // [num_slots]
  const int32_t* slots;         // [batch] or null
  const int32_t* cu_seqlens_q;  // [batch + 1] or null: node i of request b has the packed row cu_seqlens_q[b] + i
  int32_t* out_tokens;          // [batch, width]
  int32_t* out_positions;       // [batch, width]
  int64_t* out_node_rows;       // [batch, width], in [0, batch * num_nodes), or packed rows
  int64_t* out_last_rows;       // [batch], in [0, batch * width)
  int64_t* out_kept_slots;      // [batch], in [0, num_slots]
  int64_t batch, accept_width, width, num_nodes, num_slots, position_offset;
};

// Write row j of request b; row 0 also writes the request's own outputs.
SD_HD void write_extend_row(const DraftExtendInputsParams& p, int64_t b, int64_t j) {
  const int64_t from = b * p.accept_width + j, to = b * p.width + j;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int32_t token = p.tokens[from], node = p.path[from], num_valid = p.num_valid[b];
  const int64_t start = slot >= 0 ? p.prefix_lens[slot] : 0;
  p.out_tokens[to] = token > 0 ? token : 0;
  p.out_positions[to] = static_cast<int32_t>(start + p.position_offset + j);
  const RowRange nodes =
      p.cu_seqlens_q ? packed_rows(p.cu_seqlens_q, b, INT32_MAX) : RowRange{b * p.num_nodes, p.num_nodes};
  // A request without rows has nothing to extend; its row index must still be valid.
  p.out_node_rows[to] = nodes.count > 0 ? nodes.first + clamp_to(int64_t{node}, 0, nodes.count - 1) : 0;
  if (j > 0) return;
  const int64_t last = num_valid < p.width ? num_valid : p.width;
  p.out_last_rows[b] = b * p.width + (last > 0 ? last - 1 : 0);
  p.out_kept_slots[b] = slot >= 0 && num_valid > 0 ? slot : p.num_slots;
}

void draft_extend_inputs(CallStream stream, const TensorView& tokens, const TensorView& path,
                         const TensorView& num_valid, const TensorView& prefix_lens, int64_t num_nodes,
                         const OptTensor& slots, const OptTensor& cu_seqlens_q, int64_t position_offset,
                         const TensorView& out_tokens, const TensorView& out_positions, const TensorView& out_node_rows,
                         const TensorView& out_last_rows, const TensorView& out_kept_slots);

void draft_extend_inputs_cpu(const DraftExtendInputsParams& p);
void draft_extend_inputs_cuda(const DraftExtendInputsParams& p, Stream stream);

}  // namespace specdec::draft
