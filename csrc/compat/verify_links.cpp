// verify_tree_greedy and tree_speculative_sampling_target_only: argument checks and the CPU implementations.
#include "compat/verify_links.h"

#include <algorithm>

namespace specdec::compat {
namespace {

// Check the arguments that both functions start with.
VerifyLinks check_verify_links(Check& check, Dim& batch, Dim& nodes, Dim& width, const TensorView& predicts,
                               const TensorView& accept_index, const TensorView& accept_token_num,
                               const TensorView& candidates, const TensorView& retrive_index) {
  Dim rows{"rows"};
  check.output("predicts", predicts, {rows}, kInt32);
  check.output("accept_index", accept_index, {batch, width}, kInt32);
  check.range("accept_index.shape[1]", width, 1, INT32_MAX);
  check.output("accept_token_num", accept_token_num, {batch}, kInt32);
  check.tensor("candidates", candidates, {batch, nodes}, kInt64);
  check.range("candidates.shape[1]", nodes, 1, kMaxWalkedNodes);
  check.tensor("retrive_index", retrive_index, {batch, nodes}, kInt64);
  return {.predicts = predicts.data<int32_t>(),
          .accept_index = accept_index.data<int32_t>(),
          .accept_token_num = accept_token_num.data<int32_t>(),
          .candidates = candidates.data<const int64_t>(),
          .retrieve_index = retrive_index.data<const int64_t>(),
          .batch = batch,
          .nodes = nodes,
          .width = width,
          .num_predicts = rows};
}

}  // namespace

void verify_tree_greedy(CallStream stream, const TensorView& predicts, const TensorView& accept_index,
                        const TensorView& accept_token_num, const TensorView& candidates,
                        const TensorView& retrive_index, const TensorView& retrive_next_token,
                        const TensorView& retrive_next_sibling, const TensorView& target_predict) {
  Check check("verify_tree_greedy");
  Dim B{"batch"}, N{"nodes"}, S{"width"};
  const VerifyLinks links =
      check_verify_links(check, B, N, S, predicts, accept_index, accept_token_num, candidates, retrive_index);
  check.tensor("retrive_next_token", retrive_next_token, {B, N}, kInt64);
  check.tensor("retrive_next_sibling", retrive_next_sibling, {B, N}, kInt64);
  check.tensor("target_predict", target_predict, {B, N}, kInt64);
  if (B == 0) return;
  const VerifyTreeGreedyParams params{.links = links,
                                      .next_token = retrive_next_token.data<const int64_t>(),
                                      .next_sibling = retrive_next_sibling.data<const int64_t>(),
                                      .target_predict = target_predict.data<const int64_t>()};
  SD_DISPATCH(check, stream, verify_tree_greedy, params);
}

void verify_tree_greedy_cpu(const VerifyTreeGreedyParams& p) {
  for (int64_t b = 0; b < p.links.batch; ++b)
    walk_greedy(
        p, b, [&](int64_t i) { return read_linked_node(p, b, i); }, [&](int64_t i) { return p.target_of(b, i); });
}

void tree_speculative_sampling_target_only(CallStream stream, const TensorView& predicts,
                                           const TensorView& accept_index, const TensorView& accept_token_num,
                                           const TensorView& candidates, const TensorView& retrive_index,
                                           const TensorView& retrive_next_token, const TensorView& retrive_next_sibling,
                                           const TensorView& uniform_samples,
                                           const TensorView& uniform_samples_for_final_sampling,
                                           const TensorView& target_probs, const TensorView& draft_probs,
                                           double threshold_single, double threshold_acc) {
  Check check("tree_speculative_sampling_target_only");
  Dim B{"batch"}, N{"nodes"}, S{"width"}, V{"vocab"};
  const VerifyLinks links =
      check_verify_links(check, B, N, S, predicts, accept_index, accept_token_num, candidates, retrive_index);
  check.tensor("retrive_next_token", retrive_next_token, {B, N}, kInt64);
  check.tensor("retrive_next_sibling", retrive_next_sibling, {B, N}, kInt64);
  check.tensor("uniform_samples", uniform_samples, {B, N}, kFloat32);
  check.tensor("uniform_samples_for_final_sampling", uniform_samples_for_final_sampling, {B}, kFloat32);
  check.tensor("target_probs", target_probs, {B, N, V}, kFloat32);
  check.range("vocab", V, 1, kMaxCompatVocab);
  check.output("draft_probs", draft_probs, {B, N, V}, kFloat32);
  for (const auto& [name, threshold] :
       {std::pair{"threshold_single", threshold_single}, {"threshold_acc", threshold_acc}})
    check.that(threshold >= 0 && threshold <= 1, name, {"is ", threshold}, "0 to 1");
  if (B == 0) return;
  const TreeSamplingParams params{
      .links = links,
      .next_token = retrive_next_token.data<const int64_t>(),
      .next_sibling = retrive_next_sibling.data<const int64_t>(),
      .coins = uniform_samples.data<const float>(),
      .final_coins = uniform_samples_for_final_sampling.data<const float>(),
      .target_probs = target_probs.data<const float>(),
      .draft_probs = draft_probs.data<float>(),
      .vocab = V,
      .threshold_single = static_cast<float>(threshold_single),
      .threshold_acc = std::max(static_cast<float>(threshold_acc), 1e-9f),
  };
  SD_DISPATCH(check, stream, tree_speculative_sampling_target_only, params);
}

void tree_speculative_sampling_target_only_cpu(const TreeSamplingParams& p) {
  SerialRows rows;
  for (int64_t b = 0; b < p.links.batch; ++b)
    walk_sampled(p, b, [&](int64_t i) { return read_linked_node(p, b, i); }, rows);
}

}  // namespace specdec::compat
