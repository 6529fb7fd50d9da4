// append_draft_backlog: argument checks and the CPU implementation.
#include "draft/append_draft_backlog.h"

#include <cstring>

#include "core/bytes.h"

namespace specdec::draft {

void append_draft_backlog(CallStream stream, const TensorView& tokens, const TensorView& path,
                          const TensorView& num_valid, const TensorView& backlog_lens, const TensorView& backlog_tokens,
                          const OptTensor& features, const OptTensor& backlog_features, const OptTensor& slots,
                          const OptTensor& cu_seqlens_q) {
  Check check("append_draft_backlog");
  Dim B{"batch"}, S{"accept_width"}, R{"num_slots"}, C{"ring"}, N{"num_nodes"}, T{"rows"}, F{"width"};
  check.tensor("tokens", tokens, {B, S}, kInt32);
  check.tensor("path", path, {B, S}, kInt32);
  check.tensor("num_valid", num_valid, {B}, kInt32);
  check.output("backlog_lens", backlog_lens, {R}, kInt32);
  check.output("backlog_tokens", backlog_tokens, {R, C}, kInt32);
  check.range("ring", C, 1, INT32_MAX);
  check.slots(slots, B, R);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  check.that(features.has_value() == backlog_features.has_value(), "backlog_features",
             features ? "is None with features" : "is a tensor without features", "both or none of them");
  if (features) {
    if (cu_seqlens_q)
      check.tensor("features", *features, {T, F}, kFloats);
    else
      check.tensor("features", *features, {B, N, F}, kFloats);
    check.output("backlog_features", *backlog_features, {R, C, F}, dtype_of(*features));
  }
  if (B == 0) return;

  const AppendDraftBacklogParams params{
      .tokens = tokens.data<const int32_t>(),
      .path = path.data<const int32_t>(),
      .num_valid = num_valid.data<const int32_t>(),
      .backlog_lens = backlog_lens.data<int32_t>(),
      .backlog_tokens = backlog_tokens.data<int32_t>(),
      .features = data_or_null<const char>(features),
      .backlog_features = data_or_null<char>(backlog_features),
      .slots = data_or_null<const int32_t>(slots),
      .cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q),
      .batch = B,
      .accept_width = S,
      .num_nodes = N,
      .num_rows = T,
      .ring = C,
      .num_slots = R,
      .row_bytes = features ? F * item_bytes(*features) : 0,
      .unit = features ? copy_unit({&*features, &*backlog_features}) : 1,
  };
  SD_DISPATCH(check, stream, append_draft_backlog, params);
}

void append_draft_backlog_cpu(const AppendDraftBacklogParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const BacklogRows r = backlog_rows(p, b);
    for (int64_t j = r.first; j < r.end; ++j) {
      append_token(p, r, j);
      if (p.row_bytes > 0)
        std::memcpy(p.backlog_features + ring_row(p, r, j) * p.row_bytes, features_of(p, r, j), p.row_bytes);
    }
    advance_backlog(p, r);
  }
}

}  // namespace specdec::draft
