// draft_extend_inputs: argument checks and the CPU implementation.
#include "draft/draft_extend_inputs.h"

namespace specdec::draft {

void draft_extend_inputs(CallStream stream, const TensorView& tokens, const TensorView& path,
                         const TensorView& num_valid, const TensorView& prefix_lens, int64_t num_nodes,
                         const OptTensor& slots, const OptTensor& cu_seqlens_q, int64_t position_offset,
                         const TensorView& out_tokens, const TensorView& out_positions, const TensorView& out_node_rows,
                         const TensorView& out_last_rows, const TensorView& out_kept_slots) {
  Check check("draft_extend_inputs");
  Dim B{"batch"}, S{"accept_width"}, R{"num_slots"}, W{"width"};
  check.tensor("tokens", tokens, {B, S}, kInt32);
  check.tensor("path", path, {B, S}, kInt32);
  check.tensor("num_valid", num_valid, {B}, kInt32);
  check.tensor("prefix_lens", prefix_lens, {R}, kInt32);
  check.range("num_nodes", num_nodes, 1, INT32_MAX);
  check.slots(slots, B, R);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  check.range("position_offset", position_offset, 0, INT32_MAX);
  check.output("out.tokens", out_tokens, {B, W}, kInt32);
  check.range("width", W, 1, S);
  check.output("out.positions", out_positions, {B, W}, kInt32);
  check.output("out.node_rows", out_node_rows, {B, W}, kInt64);
  check.output("out.last_rows", out_last_rows, {B}, kInt64);
  check.output("out.kept_slots", out_kept_slots, {B}, kInt64);
  if (B == 0) return;

  const DraftExtendInputsParams params{
      .tokens = tokens.data<int32_t>(),
      .path = path.data<int32_t>(),
      .num_valid = num_valid.data<int32_t>(),
      .prefix_lens = prefix_lens.data<int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q),
      .out_tokens = out_tokens.data<int32_t>(),
      .out_positions = out_positions.data<int32_t>(),
      .out_node_rows = out_node_rows.data<int64_t>(),
      .out_last_rows = out_last_rows.data<int64_t>(),
      .out_kept_slots = out_kept_slots.data<int64_t>(),
      .batch = B,
      .accept_width = S,
      .width = W,
      .num_nodes = num_nodes,
      .num_slots = R,
      .position_offset = position_offset,
  };
  SD_DISPATCH(check, stream, draft_extend_inputs, params);
}

void draft_extend_inputs_cpu(const DraftExtendInputsParams& p) {
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t j = 0; j < p.width; ++j) write_extend_row(p, b, j);
}

}  // namespace specdec::draft
