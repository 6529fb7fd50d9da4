// Drafting: the checks of NgramIndex::draft and its CPU half.
//
// Candidates are places where the context's last n tokens stood: longest n first, newest first, each place once. A
// place's match is verified backwards against the stored text (up to 32 tokens), and one shorter than n is a hash
// collision. Its weight is 2^min(match, 24), four times that in the request's own text.
//
// A node is the set of candidates that agree on the path to it; its children are the groups of their next tokens.
// p(child) = p * sum w(group) / sum w(node) telescopes to w(node) / w(root), so the order is one of integers, the same
// on every device. A candidate whose text ends keeps its share: nobody knows what came next. The tree grows best first:
// larger weight, then longer best match, then the earliest candidate; no two open nodes share a candidate.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/slots.h"
#include "ngram/ngram_index.h"

namespace specdec {
namespace {

struct Candidate {
  NgramCursor next;  // its next token
  uint32_t weight;
  int match;
};

struct Candidates {
  Candidate at[kNgramCandidates];
  int count = 0;
  int longest = 0;
};

// The entry of each order's n-gram, or none, and the positions it holds.
Candidates find_candidates(const NgramView& v, const NgramSlot& slot, int64_t min_match) {
  int32_t context[kNgramMaxMatch];  // newest first
  const int context_len = static_cast<int>(std::min<uint32_t>(slot.length, kNgramMaxMatch));
  for (int i = 0; i < context_len; ++i) context[i] = slot.tail[(slot.length - 1 - i) % kNgramMaxMatch];

  uint64_t keys[kNgramOrders];
  int orders = 0;
  uint64_t hash = 0;
  for (int n = 1; n <= std::min(context_len, kNgramLongest); ++n) {
    hash = ngram_hash_step(hash, context[n - 1]);
    if (n != 1 << orders) continue;
    keys[orders] = ngram_key(hash, orders);
    const char* set = reinterpret_cast<const char*>(v.sets + ngram_set_of(v, keys[orders]));
    for (size_t line = 0; line < sizeof(NgramSet); line += 64) __builtin_prefetch(set + line);
    ++orders;
  }

  // Every position once, with the longest n that names it, so that all the text can be on its way before it is read.
  uint32_t positions[kNgramCandidates];
  int named_by[kNgramCandidates];
  int found = 0;
  for (int order = orders - 1; order >= 0; --order) {
    const NgramSet& set = v.sets[ngram_set_of(v, keys[order])];
    const int way = ngram_find(set, ngram_tag(keys[order]));
    if (way < 0) continue;
    const int held = std::min<int>(set.meta[way] & 0xff, 1 + kNgramOlder);
    for (int i = 0; i < held; ++i) {
      const uint32_t position = i == 0 ? set.newest[way] : set.older[way][i - 1];
      positions[found] = position;
      named_by[found++] = 1 << order;
      const uint32_t index = (position >> kNgramOffsetBits) & ((1u << v.block_bits) - 1);
      const char* block = reinterpret_cast<const char*>(v.blocks + index);
      __builtin_prefetch(block);
      __builtin_prefetch(block + 64);
    }
  }

  Candidates c;
  uint32_t taken[kNgramCandidates];
  for (int i = 0; i < found; ++i) {
    if (std::find(taken, taken + c.count, positions[i]) != taken + c.count) continue;
    const NgramCursor next = ngram_cursor(v, positions[i]);
    if (!next.block) continue;  // the ring has overwritten it
    const int match = ngram_match(v, next, context, context_len);
    if (match < named_by[i] || match < min_match) continue;
    taken[c.count] = positions[i];
    c.at[c.count++] = {next, ngram_weight(match, next.block->owner == slot.stream), match};
    c.longest = std::max(c.longest, match);
  }
  return c;
}

// A node that may be added: the candidates that agree on the path to it.
struct Open {
  uint32_t members;  // bit i: candidate i
  uint32_t weight;
  int match;  // the longest of its candidates
  int32_t token;
  int32_t parent;

  int first() const { return std::countr_zero(members); }
  bool before(const Open& other) const {
    if (weight != other.weight) return weight > other.weight;
    if (match != other.match) return match > other.match;
    return first() < other.first();
  }
};

// Appends the children of a node to `open`: one for each different next token of its members.
int open_children(Open* open, int count, const Candidates& c, uint32_t members, int32_t node) {
  const int begin = count;
  for (; members != 0; members &= members - 1) {
    const int i = std::countr_zero(members);
    const int32_t token = ngram_token(c.at[i].next);
    if (token < 0) continue;
    Open* const child = std::find_if(open + begin, open + count, [&](const Open& o) { return o.token == token; });
    if (child == open + count) {
      ++count;
      *child = {.members = 0, .weight = 0, .match = 0, .token = token, .parent = node};
    }
    child->members |= 1u << i;
    child->weight += c.at[i].weight;
    child->match = std::max(child->match, c.at[i].match);
  }
  return count;
}

// Grows the tree of a row behind its root, and returns the number of nodes.
int32_t grow_tree(const NgramDraftParams& p, Candidates& c, int32_t* tokens, int32_t* parents, float* scores) {
  Open open[kNgramCandidates];  // disjoint members, so never more than there are candidates
  double total = 0;
  for (int i = 0; i < c.count; ++i) total += c.at[i].weight;
  const uint32_t all = static_cast<uint32_t>((uint64_t{1} << c.count) - 1);
  int count = open_children(open, 0, c, all, 0);
  int32_t used = 1;
  while (count > 0 && used < p.out.nodes) {
    Open* const first = std::min_element(open, open + count, [](const Open& a, const Open& b) { return a.before(b); });
    const Open best = *first;
    const double probability = best.weight / total;
    if (probability < p.min_prob) break;  // and so are all others
    tokens[used] = best.token;
    parents[used] = best.parent;
    scores[used] = static_cast<float>(std::log(probability));
    if (p.chain)
      count = 0;
    else
      *first = open[--count];
    for (uint32_t m = best.members; m != 0; m &= m - 1) ngram_forward(p.index, c.at[std::countr_zero(m)].next);
    count = open_children(open, count, c, best.members, used);
    ++used;
  }
  return used;
}

}  // namespace

void NgramIndex::draft(const OptTensor& slots, const TensorView& seq_lens, int64_t num_draft_tokens, bool chain,
                       double min_prob, int64_t min_match, const TensorView& out_tokens, const TensorView& out_parents,
                       const TensorView& out_positions, const TensorView& out_first_child,
                       const TensorView& out_next_sibling, const TensorView& out_mask, const TensorView& out_num_nodes,
                       const TensorView& out_scores, const TensorView& out_match_len) {
  Check check("ngram_draft");
  Dim B{"batch"}, N{"num_draft_tokens", num_draft_tokens}, S{"num_slots", view_.num_slots};
  check.tensor("slots", slots, {B}, kInt32);
  check.tensor("seq_lens", seq_lens, {B}, kInt32);
  check.slots(slots, B, S);
  check.require_cpu();
  check.range("num_draft_tokens", N, 1, kMaxTreeNodes);
  if (!(min_prob >= 0 && min_prob <= 1)) check.that(false, "min_prob", "is " + std::to_string(min_prob), "0 to 1");
  check.range("min_match", min_match, 1, kNgramMaxMatch);
  const TreeOut out = check_tree_out(check, B, N, out_tokens, out_parents, out_positions, out_first_child,
                                     out_next_sibling, out_mask, out_num_nodes);
  check.output("out_scores", out_scores, {B, N}, kFloat32);
  check.output("out_match_len", out_match_len, {B}, kInt32);

  const std::lock_guard lock(mutex_);
  const NgramDraftParams params{
      .index = view_,
      .slots = data_or_null<const int32_t>(slots),
      .seq_lens = seq_lens.data<const int32_t>(),
      .out = out,
      .out_scores = out_scores.data<float>(),
      .out_match_len = out_match_len.data<int32_t>(),
      .batch = B,
      .chain = chain,
      .min_prob = min_prob,
      .min_match = min_match,
  };
  ngram_draft_cpu(params);
  for (int64_t b = 0; b < B; ++b) {
    const int32_t nodes = out.num_nodes[b];
    if (nodes == 0) continue;
    ++statistics_.drafts;
    statistics_.matches += params.out_match_len[b] > 0;
    statistics_.drafted += nodes - 1;
  }
}

void ngram_draft_cpu(const NgramDraftParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    float* scores = p.out_scores + b * p.out.nodes;
    std::fill_n(scores, p.out.nodes, -std::numeric_limits<float>::infinity());
    p.out_match_len[b] = 0;
    int32_t tokens[kMaxTreeNodes], parents[kMaxTreeNodes];
    TreeRow row{{}, tokens, parents};

    const int64_t number = slot_of(p.slots, b, p.index.num_slots);
    if (number >= 0 && p.index.slots[number].length > 0) {
      const NgramSlot& slot = p.index.slots[number];
      Candidates candidates = find_candidates(p.index, slot, p.min_match);
      row.root_token = tokens[0] = slot.tail[(slot.length - 1) % kNgramMaxMatch];
      parents[0] = -1;
      scores[0] = 0;
      row.count = grow_tree(p, candidates, tokens, parents, scores);
      row.seq_len = p.seq_lens[b];
      p.out_match_len[b] = candidates.longest;
    }
    write_row(p.out, b, row);
  }
}

}  // namespace specdec
