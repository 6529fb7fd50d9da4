// verify_tree_greedy and tree_speculative_sampling_target_only: SGLang's verification of a tree, greedy and sampled.
#pragma once

#include "compat/linked_walk.h"
#include "compat/row_draws.h"
#include "core/dispatch.h"

namespace specdec::compat {

struct VerifyTreeGreedyParams {
  VerifyLinks links;
  const int64_t* next_token;      // [batch, nodes]
  const int64_t* next_sibling;    // [batch, nodes]
  const int64_t* target_predict;  // [batch * nodes], by flat row

  // Return the target's token after a node, or -1 if its flat row is out of range.
  SD_HD int64_t target_of(int64_t b, int64_t node) const {
    const int64_t row = links.flat_row(b, node);
    return row >= 0 && row < links.batch * links.nodes ? target_predict[row] : -1;
  }
};

struct TreeSamplingParams {
  VerifyLinks links;
  const int64_t* next_token;
  const int64_t* next_sibling;
  const float* coins;         // [batch, nodes]
  const float* final_coins;   // [batch]
  const float* target_probs;  // [batch, nodes, vocab]
  float* draft_probs;         // [batch, nodes, vocab]: gets the target's probability of each rejected token
  int64_t vocab;
  float threshold_single, threshold_acc;
};

template <class Params>
SD_HD LinkedNode read_linked_node(const Params& p, int64_t b, int64_t i) {
  const int64_t at = b * p.links.nodes + i;
  return {p.links.candidates[at], narrow_link(p.next_token[at]), narrow_link(p.next_sibling[at])};
}

// Walk one request's tree greedily. targets(node) is target_of.
template <class Nodes, class Targets>
SD_HD void walk_greedy(const VerifyTreeGreedyParams& p, int64_t b, const Nodes& nodes, const Targets& targets) {
  const VerifyLinks& out = p.links;
  int64_t node = 0;
  out.keep(b, 0, 0);
  const int64_t count = walk_links(
      nodes, out.nodes, out.width,
      [&](int64_t from, int64_t, int64_t token) { return token == targets(from) && token >= 0; },
      [&](int64_t place, int64_t from, int64_t child, int64_t token) {
        out.predict(b, from, token);
        out.keep(b, place, child);
      },
      node);
  out.predict(b, node, targets(node));
  out.accept_token_num[b] = static_cast<int32_t>(count);
}

template <class Nodes, class Rows>
SD_HD void walk_sampled(const TreeSamplingParams& p, int64_t b, const Nodes& nodes, Rows& rows) {
  const VerifyLinks& out = p.links;
  const int64_t first = b * out.nodes;
  int64_t node = 0;
  float coin = p.coins[first], sum = 0;
  if (rows.writes()) out.keep(b, 0, 0);
  const int64_t count = walk_links(
      nodes, out.nodes, out.width,
      [&](int64_t from, int64_t, int64_t token) {
        if (token < 0 || token >= p.vocab) return false;
        const int64_t at = (first + from) * p.vocab + token;
        const float prob = probability(p.target_probs[at]);
        sum = add(sum, prob);
        if (prob > 0 && (coin < div(sum, p.threshold_acc) || prob >= p.threshold_single)) return true;
        if (rows.writes()) p.draft_probs[at] = prob;
        return false;
      },
      [&](int64_t place, int64_t from, int64_t child, int64_t token) {
        coin = p.coins[first + child];
        sum = 0;
        if (!rows.writes()) return;
        out.predict(b, from, token);
        out.keep(b, place, child);
      },
      node);
  rows.wait_for_writes();

  const int64_t at = (first + node) * p.vocab;
  const bool was_cut = count + 1 >= out.width;  // then no child was rejected at this node
  const GivenProbabilities target{p.target_probs + at};
  const DraftProbabilities rejected{was_cut ? nullptr : p.draft_probs + at};
  const int64_t token = rows.draw(Residual<GivenProbabilities>{target, rejected}, p.vocab, p.final_coins[b]);
  if (!rows.writes()) return;
  out.predict(b, node, token >= 0 ? token : p.vocab - 1);
  out.accept_token_num[b] = static_cast<int32_t>(count);
}

void verify_tree_greedy(CallStream stream, const TensorView& predicts, const TensorView& accept_index,
                        const TensorView& accept_token_num, const TensorView& candidates,
                        const TensorView& retrive_index, const TensorView& retrive_next_token,
                        const TensorView& retrive_next_sibling, const TensorView& target_predict);
void tree_speculative_sampling_target_only(CallStream stream, const TensorView& predicts,
                                           const TensorView& accept_index, const TensorView& accept_token_num,
                                           const TensorView& candidates, const TensorView& retrive_index,
                                           const TensorView& retrive_next_token, const TensorView& retrive_next_sibling,
                                           const TensorView& uniform_samples,
                                           const TensorView& uniform_samples_for_final_sampling,
                                           const TensorView& target_probs, const TensorView& draft_probs,
                                           double threshold_single, double threshold_acc);

void verify_tree_greedy_cpu(const VerifyTreeGreedyParams& p);
void verify_tree_greedy_cuda(const VerifyTreeGreedyParams& p, Stream stream);
void tree_speculative_sampling_target_only_cpu(const TreeSamplingParams& p);
void tree_speculative_sampling_target_only_cuda(const TreeSamplingParams& p, Stream stream);

}  // namespace specdec::compat
