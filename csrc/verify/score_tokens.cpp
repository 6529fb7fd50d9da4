// score_tokens: argument checks and the CPU implementation.
#include "verify/score_tokens.h"

#include <algorithm>
#include <limits>

#include "core/best_list.h"
#include "core/row_softmax.h"

namespace specdec::verify {

void score_tokens(CallStream stream, const TensorView& logits, const TensorView& path, const TensorView& tokens,
                  const TensorView& num_valid, int64_t top_n, const OptTensor& slots, const OptTensor& num_logprobs,
                  const OptTensor& cu_seqlens_q, const TensorView& out_logprobs, const TensorView& out_top_ids,
                  const TensorView& out_top_logprobs) {
  Check check("score_tokens");
  Dim B{"batch"}, N{"num_nodes"}, V{"vocab"}, S{"accept_width"}, K{"top_n", top_n}, R{"num_slots"}, T{"rows"};
  const bool packed = cu_seqlens_q.has_value();
  if (packed)
    check.strided("logits", logits, {T, V}, kFloats);
  else
    check.strided("logits", logits, {B, N, V}, kFloats);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  check.range("vocab", V, 1, std::numeric_limits<int32_t>::max());
  check.tensor("accepted.path", path, {B, S}, kInt32);
  check.tensor("accepted.tokens", tokens, {B, S}, kInt32);
  check.tensor("accepted.num_valid", num_valid, {B}, kInt32);
  check.range("top_n", top_n, 0, std::min<int64_t>(V, kMaxTopAlternatives));
  check.that(num_logprobs || !slots, "slots", "is given", "None, since num_logprobs is None");
  check.tensor("num_logprobs", num_logprobs, {R}, kInt32);
  if (num_logprobs) check.slots(slots, B, R);
  check.output("out.logprobs", out_logprobs, {B, S}, kFloat32);
  check.output("out.top_ids", out_top_ids, {B, S, K}, kInt32);
  check.output("out.top_logprobs", out_top_logprobs, {B, S, K}, kFloat32);
  if (B == 0 || S == 0) return;

  const ScoreTokensParams params{
      .logits = logits.data<void>(),
      .logits_dtype = dtype_of(logits),
      .logits_batch_stride = packed ? 0 : logits.stride(0),
      .logits_node_stride = logits.stride(packed ? 0 : 1),
      .path = path.data<const int32_t>(),
      .tokens = tokens.data<const int32_t>(),
      .num_valid = num_valid.data<const int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .num_logprobs = data_or_null<const int32_t>(num_logprobs),
      .cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q),
      .out_logprobs = out_logprobs.data<float>(),
      .out_top_ids = out_top_ids.data<int32_t>(),
      .out_top_logprobs = out_top_logprobs.data<float>(),
      .batch = B,
      .num_nodes = N,
      .num_rows = T,
      .vocab = V,
      .width = S,
      .top_n = top_n,
      .num_slots = R,
  };
  SD_DISPATCH(check, stream, score_tokens, params);
}

void score_tokens_cpu(const ScoreTokensParams& p) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    for (int64_t r = 0; r < p.batch * p.width; ++r) {
      float* top_logprobs = p.out_top_logprobs + r * p.top_n;
      int32_t* top_ids = p.out_top_ids + r * p.top_n;
      p.out_logprobs[r] = -INFINITY;
      std::fill_n(top_ids, p.top_n, -1);
      std::fill_n(top_logprobs, p.top_n, -INFINITY);
      const int64_t wanted = wanted_top_n(p, r / p.width);
      const int64_t start = wanted < 0 ? -1 : logits_of_token(p, r / p.width, r % p.width);
      if (start < 0) continue;
      const T* row = static_cast<const T*>(p.logits) + start;
      const RowSoftmax softmax(row, p.vocab, kLog2e);
      p.out_logprobs[r] = softmax.logprob(to_float(row[p.tokens[r]]));
      if (wanted == 0) continue;
      BestList<kMaxTopAlternatives> best(static_cast<int>(wanted));
      offer_row(row, p.vocab, best);
      std::copy_n(best.ids(), wanted, top_ids);
      for (int64_t i = 0; i < wanted; ++i) top_logprobs[i] = softmax.logprob(best.scores()[i]);
    }
  });
}

}  // namespace specdec::verify
