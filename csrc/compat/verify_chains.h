// chain_speculative_sampling, SGLang's rejection sampling of chains, and rejection_sample, vLLM's over ragged ones.
#pragma once

#include "compat/linked_walk.h"
#include "compat/row_draws.h"
#include "core/dispatch.h"

namespace specdec::compat {

struct ChainSamplingParams {
  VerifyLinks links;          // nodes: the root and its drafts
  const float* coins;         // [batch, coin_columns]: draft s is decided by column s - 1
  const float* final_coins;   // [batch]
  const float* target_probs;  // [batch, nodes, vocab]
  const float* draft_probs;   // [batch, nodes - 1, vocab]
  int64_t coin_columns, vocab;
  bool in_blocks;

  SD_HD const float* target_row(int64_t b, int64_t i) const { return target_probs + (b * links.nodes + i) * vocab; }
  SD_HD const float* draft_row(int64_t b, int64_t i) const { return draft_probs + (b * (links.nodes - 1) + i) * vocab; }
  // What the draft after node i left of the target there; all of the target behind the last draft.
  SD_HD Residual<GivenProbabilities> residual(int64_t b, int64_t i, float scale) const {
    if (i + 1 >= links.nodes) return {{target_row(b, i)}, {}, 1};
    return {{target_row(b, i)}, {draft_row(b, i)}, scale};
  }
};

struct RejectionSampleParams {
  const int32_t* draft_tokens;  // [num_tokens], request after request
  const int32_t* ends;          // [batch]: where each request's drafts end
  const float* draft_probs;     // [num_tokens, vocab] or null: each draft had all of the probability
  const void* target_logits;    // [num_tokens, vocab], float dtype; rows this many elements apart:
  int64_t logits_stride;
  Dtypes logits_dtype;
  const int32_t* bonus_tokens;  // [batch]
  const float* temperature;     // [batch] or null: all greedy; what is not above 0 is greedy
  const float* coins;           // [num_tokens]
  const float* final_coins;     // [batch]
  int32_t* out_tokens;          // [batch, max_drafts + 1]
  int64_t batch, num_tokens, max_drafts, vocab;
};

// p / q of a draft's token, times what its prefix has; at most 1, and 0 where q is no probability above 0.
SD_HD float extended(float prefix, float p, float q) {
  const float ratio = q > 0 && q <= 1 ? div(mul(prefix, p), q) : 0.0f;
  return ratio > 0 ? (ratio < 1 ? ratio : 1) : 0;
}

// How many drafts are accepted, and the scale of the target in what is left then. Block verification (Sun et al.,
// arXiv 2403.10444) accepts the longest prefix that its coin accepts, whatever came before.
template <class Rows>
SD_HD int64_t accept_drafts(const ChainSamplingParams& p, int64_t b, Rows& rows, float& scale) {
  const int64_t* tokens = p.links.candidates + b * p.links.nodes;
  const float* coins = p.coins + b * p.coin_columns;
  int64_t accepted = 0;
  float prefix = 1;
  scale = 1;
  for (int64_t s = 1; s < p.links.nodes; ++s) {
    const int64_t token = tokens[s];
    const bool exists = token >= 0 && token < p.vocab;
    const float target = exists ? p.target_row(b, s - 1)[token] : 0, draft = exists ? p.draft_row(b, s - 1)[token] : 0;
    if (!p.in_blocks) {
      if (!(draft > 0 && draft <= 1 && mul(coins[s - 1], draft) < target)) break;
      accepted = s;
      continue;
    }
    prefix = extended(prefix, target, draft);
    if (!(coins[s - 1] < prefix)) continue;
    float chance = prefix;
    if (s + 1 < p.links.nodes && prefix < 1) {
      constexpr float kUnit = 0x1p-40f;
      const float mass = mul(static_cast<float>(rows.total(p.residual(b, s, prefix), p.vocab)), kUnit);
      chance = div(mass, add(mass, sub(1, prefix)));
    }
    if (!(coins[s - 1] < chance)) continue;
    accepted = s;
    scale = prefix;
  }
  return accepted;
}

template <class Rows>
SD_HD void sample_chain(const ChainSamplingParams& p, int64_t b, Rows& rows) {
  const VerifyLinks& out = p.links;
  float scale = 1;
  const int64_t accepted = accept_drafts(p, b, rows, scale);
  const int64_t token = rows.draw(p.residual(b, accepted, scale), p.vocab, p.final_coins[b]);
  if (!rows.writes()) return;
  for (int64_t i = 0; i <= accepted; ++i) {
    out.keep(b, i, i);
    if (i < accepted) out.predict(b, i, out.candidates[b * out.nodes + i + 1]);
  }
  out.predict(b, accepted, token >= 0 ? token : p.vocab - 1);
  out.accept_token_num[b] = static_cast<int32_t>(accepted);
}

// The token that a rejected draft is replaced with, or the draft itself.
template <class T, class Rows>
SD_HD int64_t decide_draft(const RejectionSampleParams& p, int64_t b, int64_t i, bool greedy, Rows& rows) {
  const int64_t draft = p.draft_tokens[i];
  const verify::LogitRow<T> logits{static_cast<const T*>(p.target_logits) + i * p.logits_stride, nullptr, nullptr};
  const uint64_t peak = rows.peak(logits, p.vocab);
  if (greedy) return peak_number(peak);
  const SoftmaxWeights<T> weights{logits, peak_value(peak)};
  const SoftmaxProbabilities<T> target{weights, div(1.0f, static_cast<float>(rows.total(weights, p.vocab)))};
  const bool exists = draft >= 0 && draft < p.vocab;
  const DraftProbabilities proposal{p.draft_probs ? p.draft_probs + i * p.vocab : nullptr};
  const float q = p.draft_probs == nullptr ? 1.0f : exists ? proposal(draft) : 0.0f;
  if (exists && q > 0 && mul(p.coins[i], q) < target(draft)) return draft;
  const float coin = p.final_coins[b];
  const int64_t token = p.draft_probs == nullptr
                            ? rows.draw(OtherWeights<T>{weights, draft}, p.vocab, coin)
                            : rows.draw(Residual<SoftmaxProbabilities<T>>{target, proposal}, p.vocab, coin);
  return token >= 0 ? token : peak_number(peak);
}

template <class T, class Rows>
SD_HD void reject_drafts(const RejectionSampleParams& p, int64_t b, Rows& rows) {
  const int64_t begin = b > 0 ? p.ends[b - 1] : 0;
  int64_t count = p.ends[b] - begin;
  if (count > p.max_drafts) count = p.max_drafts;
  if (begin < 0 || begin + count > p.num_tokens) count = 0;
  const bool greedy = p.temperature == nullptr || !(p.temperature[b] > 0);
  int32_t* out = p.out_tokens + b * (p.max_drafts + 1);
  int64_t place = 0;
  bool rejected = false;
  for (; place < count && !rejected; ++place) {
    const int64_t token = decide_draft<T>(p, b, begin + place, greedy, rows);
    rejected = token != p.draft_tokens[begin + place];
    if (rows.writes()) out[place] = static_cast<int32_t>(token);
  }
  if (!rows.writes()) return;
  if (!rejected) out[place++] = p.bonus_tokens[b];
  for (; place <= p.max_drafts; ++place) out[place] = -1;
}

void chain_speculative_sampling(CallStream stream, const TensorView& predicts, const TensorView& accept_index,
                                const TensorView& accept_token_num, const TensorView& candidates,
                                const TensorView& retrive_index, const TensorView& uniform_samples,
                                const TensorView& uniform_samples_for_final_sampling, const TensorView& target_probs,
                                const TensorView& draft_probs, bool block_verification);
void rejection_sample(CallStream stream, const TensorView& draft_token_ids, int64_t max_spec_len,
                      const TensorView& cu_num_draft_tokens, const OptTensor& draft_probs,
                      const TensorView& target_logits, const TensorView& bonus_token_ids, const OptTensor& temperature,
                      const TensorView& uniform_probs, const TensorView& final_probs,
                      const TensorView& output_token_ids);

void chain_speculative_sampling_cpu(const ChainSamplingParams& p);
void chain_speculative_sampling_cuda(const ChainSamplingParams& p, Stream stream);
void rejection_sample_cpu(const RejectionSampleParams& p);
void rejection_sample_cuda(const RejectionSampleParams& p, Stream stream);

}  // namespace specdec::compat
