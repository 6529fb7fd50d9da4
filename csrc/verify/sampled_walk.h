// The walk down one tree whose candidates were sampled, the same on both devices (docs/verification.md).
//
// A node whose children were drawn without replacement from q goes through them in draw order: child d is accepted with
// probability min(1, p(d) / q(d)); otherwise p becomes what is left of it, max(p - q, 0), and q loses d. What is
// subtracted is always a multiple of the same q, and clamping twice is clamping once, so a node's state is one number:
// what is left of a token of weight w, of which the draft's weight is w', is max(w - scale * w', 0), where each
// rejection adds (the sum of what is left) / (the sum of the draft's weights that are left) to `scale`. Nothing is
// normalised. A rejected token is left with nothing by the same formula.
#pragma once

#include "verify/verify_tree.h"

namespace specdec::verify {

// In units of 2^-40 of the row's likeliest token; the sum of it is taken of its integer part.
SD_HD float left_of(uint64_t target, uint64_t draft, float scale) {
  const float left = sub(static_cast<float>(target), mul(scale, static_cast<float>(draft)));
  return left > 0 ? left : 0;
}
SD_HD uint64_t left_weight(uint64_t target, uint64_t draft, float scale) {
  return static_cast<uint64_t>(left_of(target, draft, scale));
}

// A token's weights at a node: the target's after its filters, and the draft's.
struct TokenPair {
  uint64_t target, draft;
};

// The coin of one sampled draft, uniform in [0, 1).
SD_HD double coin(uint64_t seed, uint32_t position, uint32_t draw) {
  return mul(static_cast<double>(noise(seed, NoiseUse::kCoin, position, draw).u64() >> 11), 0x1p-53);
}

// Which draft a request's candidates were drawn with; greedy where they count as not sampled.
SD_HD Sampler draft_sampler_of(const VerifyTreeParams& p, int64_t slot) {
  const float* temperature = p.drafts.temperature ? p.drafts.temperature : p.sampling.temperature;
  return sampler_of({temperature, nullptr, nullptr, nullptr, p.sampling.seeds}, slot, p.drafts.vocab);
}

// One request. `Rows` is what a device does with rows of logits:
//   int32_t token(node, position)           the target's own token after a node, or -1
//   bool open(node, draft_row)              turns to a node and its draft's row: whether the target has any token there
//   uint64_t target_total(), draft_total()  the sums of the weights
//   TokenPair pair(token)                   {0, 0} for what is no token of the draft's vocabulary
//   uint64_t leave(scale)                   sets what is left, and returns its sum
//   int32_t draw(random)                    a token from what is left, of which there is some
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

  // Returns bits for the slot's status.
  SD_HD int32_t run() {
    int32_t node = p_.drafts.in_blocks && drafts_sampled_ ? take_block() : 0;
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

  // Emits the token after a node. Returns the node to go on from, if any.
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

  // The token after a node whose children were drawn from that row of the draft's, and the child that carries it.
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
      if (pair.draft == 0 || carried_before(first, next)) continue;  // cannot have been drawn: it says nothing

      const float step = static_cast<float>(div(static_cast<double>(target), static_cast<double>(draft)));
      const auto wanted = static_cast<double>(mul(step, static_cast<float>(pair.draft)));
      if (mul(coin(sampler_.seed, position, draw), wanted) < left_of(pair.target, pair.draft, scale)) return token;
      scale = add(scale, step);
      draft -= pair.draft;
      target = rows_.leave(scale);
      if (target == 0) return token;  // p and q differ by their rounding alone
    }
    if (scale == 0) rows_.leave(0);
    return rows_.draw(noise(sampler_.seed, NoiseUse::kToken, position, 0).u64());
  }

  // Whether one of the siblings from `first` to before `child` has its token.
  SD_HD bool carried_before(int32_t first, int32_t child) const {
    int32_t i = first;
    while (i != child && node_at(i).token != node_at(child).token) i = node_at(i).next_sibling;
    return i != child;
  }

  // Block verification of the chain of sampled nodes at the root: as far as each node has one child and that was
  // sampled. Emits what it accepts. Returns the chain's last node where all of it is accepted, for the walk to go on
  // from; otherwise it emits the bonus, too, and returns kNoChild.
  SD_HD int32_t take_block() {
    const uint32_t position = position_after(p_, b_, 0);
    double share = 1;  // p_i of the paper: how much of the target's probability the first i drafts have
    int32_t node = 0, length = 0;
    int32_t kept = 0, kept_node = 0, kept_row = 0;  // drafts accepted so far, and the last of them
    float kept_scale = 0;
    while (true) {
      const int32_t child = length + 1 < out_.accept_width ? only_child(node) : kNoChild;
      const int32_t row = child >= 0 ? draft_row(child) : kNotSampled;
      TokenPair pair{};
      if (row >= 0 && row < p_.drafts.num_rows && rows_.open(node, row)) pair = rows_.pair(node_at(child).token);
      if (pair.draft == 0) break;

      const auto target = static_cast<double>(rows_.target_total()), draft = static_cast<double>(rows_.draft_total());
      const auto scale = static_cast<float>(div(div(target, draft), share));
      // A share of 1 always ends a block here rather than before, unless p and q are equal: then longer ones are kept.
      if (share == 1 || coin(sampler_.seed, position, length) < chance(share, scale, target)) {
        kept = length;
        kept_node = node;
        kept_row = row;
        kept_scale = scale;
      }
      const auto target_weight = static_cast<double>(pair.target), draft_weight = static_cast<double>(pair.draft);
      share = mul(share, div(mul(target_weight, draft), mul(draft_weight, target)));
      share = share > 1 ? 1 : share < 0x1p-60 ? 0 : share;
      node = child;
      ++length;
      if (share == 0) break;  // it stays 0
    }
    const bool all = length == 0 || coin(sampler_.seed, position, length) < share;
    emit_chain(all ? length : kept);
    if (all) return node;

    rows_.open(kept_node, kept_row);
    if (rows_.leave(kept_scale) == 0) rows_.leave(0);  // p and q differ by their rounding alone
    const uint32_t after = position_after(p_, b_, kept_node);
    out_.emit(rows_.draw(noise(sampler_.seed, NoiseUse::kToken, after, 0).u64()), kept_node, writes_);
    return kNoChild;
  }

  // The chance (h_i) that a block ends here rather than before, where its `share` is below 1.
  SD_HD double chance(double share, float scale, double target) {
    const double rest = mul(share, div(static_cast<double>(rows_.leave(scale)), target));
    return rest > 0 ? div(rest, add(rest, add(1.0, -share))) : 0;
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
