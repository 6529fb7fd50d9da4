#include "compat/verify_chains.h"

#include "compat/verify_links.h"

namespace specdec::compat {

void chain_speculative_sampling(CallStream stream, const TensorView& predicts, const TensorView& accept_index,
                                const TensorView& accept_token_num, const TensorView& candidates,
                                const TensorView& retrive_index, const TensorView& uniform_samples,
                                const TensorView& uniform_samples_for_final_sampling, const TensorView& target_probs,
                                const TensorView& draft_probs, bool block_verification) {
  Check check("chain_speculative_sampling");
  Dim B{"batch"}, N{"nodes"}, V{"vocab"}, C{"coins"};
  const VerifyLinks links =
      check_verify_links(check, B, N, N, predicts, accept_index, accept_token_num, candidates, retrive_index);
  check.tensor("uniform_samples", uniform_samples, {B, C}, kFloat32);
  check.range("uniform_samples.shape[1]", C, N - 1, INT32_MAX);
  check.tensor("uniform_samples_for_final_sampling", uniform_samples_for_final_sampling, {B}, kFloat32);
  check.tensor("target_probs", target_probs, {B, N, V}, kFloat32);
  check.range("vocab", V, 1, kMaxCompatVocab);
  check.tensor("draft_probs", draft_probs, {B, N - 1, V}, kFloat32);
  if (B == 0) return;
  const ChainSamplingParams params{.links = links,
                                   .coins = uniform_samples.data<const float>(),
                                   .final_coins = uniform_samples_for_final_sampling.data<const float>(),
                                   .target_probs = target_probs.data<const float>(),
                                   .draft_probs = draft_probs.data<const float>(),
                                   .coin_columns = C,
                                   .vocab = V,
                                   .in_blocks = block_verification};
  SD_DISPATCH(check, stream, chain_speculative_sampling, params);
}

void chain_speculative_sampling_cpu(const ChainSamplingParams& p) {
  SerialRows rows;
  for (int64_t b = 0; b < p.links.batch; ++b) sample_chain(p, b, rows);
}

void rejection_sample(CallStream stream, const TensorView& draft_token_ids, int64_t max_spec_len,
                      const TensorView& cu_num_draft_tokens, const OptTensor& draft_probs,
                      const TensorView& target_logits, const TensorView& bonus_token_ids, const OptTensor& temperature,
                      const TensorView& uniform_probs, const TensorView& final_probs,
                      const TensorView& output_token_ids) {
  Check check("rejection_sample");
  Dim T{"tokens"}, B{"batch"}, V{"vocab"}, S{"max_spec_len + 1", max_spec_len + 1};
  check.strided("target_logits", target_logits, {T, V}, kFloats);
  check.range("vocab", V, 1, kMaxCompatVocab);
  check.tensor("draft_token_ids", draft_token_ids, {T}, kInt32);
  check.range("max_spec_len", max_spec_len, 0, INT32_MAX - 1);
  check.tensor("cu_num_draft_tokens", cu_num_draft_tokens, {B}, kInt32);
  check.tensor("draft_probs", draft_probs, {T, V}, kFloat32);
  check.tensor("bonus_token_ids", bonus_token_ids, {B}, kInt32);
  check.tensor("temperature", temperature, {B}, kFloat32);
  check.tensor("uniform_probs", uniform_probs, {T}, kFloat32);
  check.tensor("final_probs", final_probs, {B}, kFloat32);
  check.output("output_token_ids", output_token_ids, {B, S}, kInt32);
  if (B == 0) return;
  const RejectionSampleParams params{.draft_tokens = draft_token_ids.data<const int32_t>(),
                                     .ends = cu_num_draft_tokens.data<const int32_t>(),
                                     .draft_probs = data_or_null<const float>(draft_probs),
                                     .target_logits = target_logits.data<void>(),
                                     .logits_stride = target_logits.stride(0),
                                     .logits_dtype = dtype_of(target_logits),
                                     .bonus_tokens = bonus_token_ids.data<const int32_t>(),
                                     .temperature = data_or_null<const float>(temperature),
                                     .coins = uniform_probs.data<const float>(),
                                     .final_coins = final_probs.data<const float>(),
                                     .out_tokens = output_token_ids.data<int32_t>(),
                                     .batch = B,
                                     .num_tokens = T,
                                     .max_drafts = max_spec_len,
                                     .vocab = V};
  SD_DISPATCH(check, stream, rejection_sample, params);
}

void rejection_sample_cpu(const RejectionSampleParams& p) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    SerialRows rows;
    for (int64_t b = 0; b < p.batch; ++b) reject_drafts<T>(p, b, rows);
  });
}

}  // namespace specdec::compat
