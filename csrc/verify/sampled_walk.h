// The walk down one tree whose candidates were sampled, shared by CPU and GPU (docs/verification.md).
//
// The children of a node are drawn without replacement from the draft's distribution q and are tested in draw order.
// Child d is accepted with probability min(1, p(d) / q(d)); otherwise p becomes the residual max(p - q, 0), and q loses
// d. Every subtraction is a multiple of the same q, and clamping twice equals clamping once, so one number describes a
// node's state: a token with target weight w and draft weight w' has the residual max(w - scale * w', 0), where each
// rejection adds (sum of the residual) / (sum of the remaining draft weights) to `scale`. Nothing is normalized. The
// same formula leaves a rejected token with a residual of 0.
#pragma once

#include "verify/verify_tree.h"

namespace specdec::verify {

// Return a token's residual, in units of 2^-40 of the row's likeliest token. Sums use its integer part.
SD_HD float residual(uint64_t target, uint64_t draft, float scale) {
  const float rest = sub(static_cast<float>(target), mul(scale, static_cast<float>(draft)));
  return rest > 0 ? rest : 0;
}
SD_HD uint64_t residual_weight(uint64_t target, uint64_t draft, float scale) {
  return static_cast<uint64_t>(residual(target, draft, scale));
}

// A token's weights at a node: the target's after filters, and the draft's.
struct TokenPair {
  uint64_t target, draft;
};

// Return the uniform number in [0, 1) that accepts or rejects one sampled draft.
SD_HD double coin(uint64_t seed, uint32_t position, uint32_t draw) {
  return mul(static_cast<double>(noise(seed, NoiseUse::kCoin, position, draw).u64() >> 11), 0x1p-53);
}

// Return the sampling parameters of a request's draft; greedy if its candidates do not count as sampled.
SD_HD Sampler draft_sampler_of(const VerifyTreeParams& p, int64_t slot) {
  const float* temperature = p.drafts.temperature ? p.drafts.temperature : p.sampling.temperature;
  return sampler_of({temperature, nullptr, nullptr, nullptr, p.sampling.seeds}, slot, p.drafts.vocab);
}

// The walk of one request. `Rows` provides a device's operations on rows of logits:
// * int32_t token(node, position): the target's own token after a node, or -1
// * bool open(node, draft_row): select a node's target row and its draft row; false if the target row has no token
// * uint64_t target_total(), draft_total(): sums of the weights
// * TokenPair pair(token): a token's weights; {0, 0} for a token outside the draft's vocabulary
// * uint64_t set_residual(scale): set the residual and return its sum
// * int32_t draw(random): draw a token from the residual, which is not empty
template <class Rows>
class SampledWalk {
 public:
  // One thread `writes`; all threads that share rows walk together.
  SD_HD SampledWalk(const VerifyTreeParams& p, int64_t b, int32_t size, const Sampler& sampler, bool drafts_sampled,
                    Rows& rows, EmittedRow& out, bool writes)
      : p_(p),
        b_(b),
        size_(size),
        sampler_(sampler),
        drafts_sampled_(drafts_sampled),
        rows_(rows),
        out_(out),
        writes_(writes) {}

  // Walk, and return bits for the slot's status.
  SD_HD int32_t run() {
    int32_t node = p_.drafts.block_verification && drafts_sampled_ ? verify_block() : 0;
    while (node >= 0) node = step(node);
    return bits_;
  }

 private:
  static constexpr int32_t kNotSampled = -1;

  SD_HD TreeNode node_at(int32_t i) const { return read_node(p_.links, b_, i); }
  SD_HD int32_t draft_row(int32_t node) const {
    return drafts_sampled_ ? p_.drafts.rows[b_ * p_.links.num_nodes + node] : kNotSampled;
  }
  SD_HD int32_t child_after(int32_t node, int32_t before, int32_t child) const {
    return checked_child([this](int32_t i) { return node_at(i); }, size_, node, before, child);
  }

  // Emit the token after a node. Return the node to continue from, or kNoChild.
  SD_HD int32_t step(int32_t node) {
    const int32_t first = child_after(node, node, node_at(node).first_child);
    const int32_t row = first >= 0 ? draft_row(first) : kNotSampled;
    int32_t next = kNoChild;
    const int32_t token =
        row == kNotSampled ? rows_.token(node, position_after(p_, b_, node)) : sampled(node, first, row, next);
    if (token < 0) bits_ |= kBadLogits;
    if (token < 0 || !out_.emit(token, node, writes_)) return kNoChild;
    if (row == kNotSampled) next = find_child([this](int32_t i) { return node_at(i); }, size_, node, first, token);
    if (next == kMalformed) bits_ |= kBadTree;
    return next;
  }

  // Return the token after a node whose children were drawn from that draft row; set `next` to the child that carries
  // it.
  SD_HD int32_t sampled(int32_t node, int32_t first, int32_t row, int32_t& next) {
    const bool no_row = row < 0 || row >= p_.drafts.num_rows;
    if (!rows_.open(node, no_row ? 0 : row)) return -1;
    const uint32_t position = position_after(p_, b_, node);
    uint64_t target = rows_.target_total(), draft = rows_.draft_total();
    float scale = 0;
    next = no_row ? kMalformed : first;
    for (uint32_t draw = 0; next >= 0; ++draw, next = child_after(node, next, node_at(next).next_sibling)) {
      if (draft_row(next) != row) {
        next = kMalformed;
        break;
      }
      const int32_t token = node_at(next).token;
      const TokenPair pair = rows_.pair(token);
      if (pair.draft == 0 || is_duplicate_sibling(first, next)) continue;  // cannot have been drawn: skip it

      const float step = static_cast<float>(div(static_cast<double>(target), static_cast<double>(draft)));
      const auto wanted = static_cast<double>(mul(step, static_cast<float>(pair.draft)));
      if (mul(coin(sampler_.seed, position, draw), wanted) < residual(pair.target, pair.draft, scale)) return token;
      scale = add(scale, step);
      draft -= pair.draft;
      target = rows_.set_residual(scale);
      if (target == 0) return token;  // p and q differ by rounding only
    }
    if (scale == 0) rows_.set_residual(0);
    return rows_.draw(noise(sampler_.seed, NoiseUse::kToken, position, 0).u64());
  }

  // Return whether a sibling from `first` to before `child` carries the same token.
  SD_HD bool is_duplicate_sibling(int32_t first, int32_t child) const {
    int32_t i = first;
    while (i != child && node_at(i).token != node_at(child).token) i = node_at(i).next_sibling;
    return i != child;
  }

  // Verify the chain of sampled nodes at the root as one block (block verification): it extends as long as each node
  // has exactly one child and that child was sampled. Emit the accepted tokens. If the whole chain is accepted, return
  // its last node, from which the walk continues; otherwise emit the bonus token and return kNoChild.
  SD_HD int32_t verify_block() {
    const uint32_t position = position_after(p_, b_, 0);
    double ratio = 1;  // p_i of the paper: clipped probability ratio of the first i drafts
    int32_t node = 0, length = 0;
    int32_t accepted = 0, accepted_node = 0, accepted_row = 0;  // drafts accepted so far, and the last of them
    float accepted_scale = 0;
    while (true) {
      const int32_t child = length + 1 < out_.accept_width ? only_child(node) : kNoChild;
      const int32_t row = child >= 0 ? draft_row(child) : kNotSampled;
      TokenPair pair{};
      if (row >= 0 && row < p_.drafts.num_rows && rows_.open(node, row)) pair = rows_.pair(node_at(child).token);
      if (pair.draft == 0) break;

      const auto target = static_cast<double>(rows_.target_total()), draft = static_cast<double>(rows_.draft_total());
      const auto scale = static_cast<float>(div(div(target, draft), ratio));
      // With a ratio of 1 the block always ends here rather than earlier, unless p and q are equal: then longer blocks
      // are accepted.
      if (ratio == 1 || coin(sampler_.seed, position, length) < end_probability(ratio, scale, target)) {
        accepted = length;
        accepted_node = node;
        accepted_row = row;
        accepted_scale = scale;
      }
      const auto target_weight = static_cast<double>(pair.target), draft_weight = static_cast<double>(pair.draft);
      ratio = mul(ratio, div(mul(target_weight, draft), mul(draft_weight, target)));
      ratio = ratio > 1 ? 1 : ratio < 0x1p-60 ? 0 : ratio;
      node = child;
      ++length;
      if (ratio == 0) break;  // it stays 0
    }
    const bool all = length == 0 || coin(sampler_.seed, position, length) < ratio;
    emit_chain(all ? length : accepted);
    if (all) return node;

    rows_.open(accepted_node, accepted_row);
    if (rows_.set_residual(accepted_scale) == 0) rows_.set_residual(0);  // p and q differ by rounding only
    const uint32_t after = position_after(p_, b_, accepted_node);
    out_.emit(rows_.draw(noise(sampler_.seed, NoiseUse::kToken, after, 0).u64()), accepted_node, writes_);
    return kNoChild;
  }

  // Return the probability h_i that the block ends here rather than earlier, for a ratio below 1.
  SD_HD double end_probability(double ratio, float scale, double target) {
    const double later = mul(ratio, div(static_cast<double>(rows_.set_residual(scale)), target));
    return later > 0 ? div(later, add(later, add(1.0, -ratio))) : 0;
  }

  SD_HD int32_t only_child(int32_t node) const {
    const int32_t child = child_after(node, node, node_at(node).first_child);
    return child >= 0 && node_at(child).next_sibling == kNoChild ? child : kNoChild;
  }

  SD_HD void emit_chain(int32_t length) {
    for (int32_t i = 0, node = 0; i < length; ++i) {
      const int32_t child = node_at(node).first_child;
      out_.emit(node_at(child).token, node, writes_);
      node = child;
    }
  }

  const VerifyTreeParams& p_;
  const int64_t b_;
  const int32_t size_;
  const Sampler& sampler_;
  const bool drafts_sampled_;
  Rows& rows_;
  EmittedRow& out_;
  const bool writes_;
  int32_t bits_ = 0;
};

}  // namespace specdec::verify
