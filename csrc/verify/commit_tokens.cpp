// commit_tokens: argument checks and the CPU implementation.
#include "verify/commit_tokens.h"

#include <algorithm>
#include <limits>

#include "verify/commit_row.h"

namespace specdec::verify {

void commit_tokens(CallStream stream, const TensorView& tokens, const TensorView& num_valid,
                   const TensorView& stop_tokens, const TensorView& remaining, const TensorView& max_seq_lens,
                   const TensorView& seq_lens, const TensorView& prefix_lens, const TensorView& root_tokens,
                   const TensorView& finish_reasons, const OptTensor& slots, const OptTensor& status,
                   const OptTensor& counts, const TensorView& out) {
  Check check("commit_tokens");
  Dim B{"batch"}, S{"accept_width"}, R{"num_slots"}, M{"max_stops"}, V{"vocab"};
  check.output("accepted.tokens", tokens, {B, S}, kInt32);
  check.range("accept_width", S, 1, std::numeric_limits<int32_t>::max());
  check.output("accepted.num_valid", num_valid, {B}, kInt32);
  check.tensor("state.stop_tokens", stop_tokens, {R, M}, kInt32);
  check.output("state.remaining", remaining, {R}, kInt32);
  check.tensor("state.max_seq_lens", max_seq_lens, {R}, kInt32);
  check.output("state.seq_lens", seq_lens, {R}, kInt32);
  check.output("state.prefix_lens", prefix_lens, {R}, kInt32);
  check.output("state.root_tokens", root_tokens, {R}, kInt32);
  check.output("state.finish_reasons", finish_reasons, {R}, kInt32);
  check.slots(slots, B, R);
  check.output("state.status", status, {R}, kInt32);
  check.output("counts", counts, {R, V}, kInt32);
  check.output("out", out, {B}, kInt32);
  if (B == 0) return;

  const CommitTokensParams params{
      .tokens = tokens.data<int32_t>(),
      .num_valid = num_valid.data<int32_t>(),
      .stop_tokens = stop_tokens.data<int32_t>(),
      .remaining = remaining.data<int32_t>(),
      .max_seq_lens = max_seq_lens.data<int32_t>(),
      .seq_lens = seq_lens.data<int32_t>(),
      .prefix_lens = prefix_lens.data<int32_t>(),
      .root_tokens = root_tokens.data<int32_t>(),
      .finish_reasons = finish_reasons.data<int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .counts = data_or_null<int32_t>(counts),
      .out = out.data<int32_t>(),
      .batch = B,
      .accept_width = S,
      .max_stops = M,
      .num_slots = R,
      .vocab = V,
  };
  SD_DISPATCH(check, stream, commit_tokens, params);
}

void commit_tokens_cpu(const CommitTokensParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_of(p.slots, b, p.num_slots);
    int32_t* tokens = p.tokens + b * p.accept_width;
    SlotState state{};
    Cut cut;
    if (slot >= 0) {
      state = slot_state(p, slot);
      int64_t stop = 0;
      while (stop < p.accept_width && !is_stop(p, slot, tokens[stop])) ++stop;
      cut = cut_row(p, state, p.num_valid[b], stop);
    }
    write_cut(p, b, slot, state, cut);
    for (int64_t j = 0; j < cut.kept; ++j) count_token(p, slot, tokens[j]);
    std::fill(tokens + cut.kept, tokens + p.accept_width, -1);
  }
}

}  // namespace specdec::verify
