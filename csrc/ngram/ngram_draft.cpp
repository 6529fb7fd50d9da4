// NgramIndex::draft: argument checks and the CPU implementation.
#include "ngram/ngram_draft.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>

#include "core/slots.h"
#include "ngram/append.h"
#include "ngram/ngram_index.h"

namespace specdec::ngram {
namespace {

constexpr int64_t kRowsTogether = 4;  // rows that a thread takes at a time

struct Candidates {
  NgramCandidate at[kNgramCandidates];
  int count = 0;
  int longest_match = 0;
  uint32_t best = kNgramNone;  // position of the first candidate with that match
};

// List the followed occurrence, then those of each order's n-gram: longest n first, then by scope, newest first.
int find_occurrences(const NgramView& v, const NgramSlot& slot, uint32_t followed, const NgramWeights& weights,
                     const int32_t* context, int context_len, NgramOccurrence* occurrences) {
  uint32_t scopes[kNgramScopes];
  const int num_scopes = ngram_find_scopes(slot, weights, scopes);
  const int orders = std::bit_width(static_cast<unsigned>(std::min(context_len, kNgramMaxOrder)));
  uint64_t keys[kNgramScopes][kNgramOrders];
  for (int s = 0; s < num_scopes; ++s) {
    ngram_keys(scopes[s], [&](int n) { return context[n - 1]; }, keys[s]);
    for (int order = 0; order < orders; ++order) {
      const char* set = reinterpret_cast<const char*>(v.sets + ngram_set_of(v, keys[s][order]));
      for (size_t line = 0; line < sizeof(NgramSet); line += 64) __builtin_prefetch(set + line);
    }
  }

  int found = 0;
  if (const NgramCursor at = ngram_cursor(v, followed); at.block && ngram_sees(slot.scope, slot.group, at.block->scope))
    occurrences[found++] = {followed, at.block->scope, 0, 0};
  for (int order = orders - 1; order >= 0; --order)
    for (int s = 0; s < num_scopes; ++s) {
      const NgramSet& set = v.sets[ngram_set_of(v, keys[s][order])];
      const int way = ngram_find(set, ngram_tag(keys[s][order]));
      if (way < 0) continue;
      const int held = std::min<int>(set.meta[way] & 0xff, kNgramRecent);
      for (int i = 0; i < held; ++i) {
        const uint32_t position = i == 0 ? set.newest[way] : set.older[way][i - 1];
        occurrences[found++] = {position, scopes[s], 1 << order, i};
        // Prefetch all texts before any is read.
        const uint32_t index = (position >> kNgramOffsetBits) & ((1u << v.block_bits) - 1);
        const char* block = reinterpret_cast<const char*>(v.blocks + index);
        __builtin_prefetch(block);
        __builtin_prefetch(block + 64);
      }
    }
  return found;
}

// Verify each occurrence once, with the longest n that lists it, until the candidates are full.
Candidates find_candidates(const NgramDraftParams& p, const NgramSlot& slot, uint32_t followed) {
  const NgramView& v = p.index;
  int32_t context[kNgramMaxMatch] = {};  // newest first
  const int context_len = static_cast<int>(std::min<uint32_t>(slot.length, kNgramMaxMatch));
  for (int i = 0; i < context_len; ++i) context[i] = slot.tail[(slot.length - 1 - i) % kNgramMaxMatch];
  NgramOccurrence occurrences[kNgramMaxOccurrences];
  const int found = find_occurrences(v, slot, followed, p.weights, context, context_len, occurrences);

  Candidates c;
  uint32_t seen[kNgramMaxOccurrences];
  int distinct = 0;
  for (int i = 0; i < found && c.count < kNgramCandidates; ++i) {
    const NgramOccurrence& occurrence = occurrences[i];
    if (std::find(seen, seen + distinct, occurrence.position) != seen + distinct) continue;
    seen[distinct++] = occurrence.position;
    const NgramCandidate candidate = ngram_verify(p, occurrence, slot.stream, context, context_len);
    if (candidate.weight == 0) continue;
    c.at[c.count++] = candidate;
    if (c.count > 1 && candidate.match <= c.longest_match) continue;
    c.longest_match = candidate.match;
    c.best = occurrence.position;
  }
  return c;
}

// Find the candidates of a stream and record what the next draft follows. Concurrent rows may share a slot.
Candidates follow_candidates(const NgramDraftParams& p, NgramSlot& slot) {
  using Atomic = std::atomic_ref<NgramFollowed>;
  const NgramFollowed at[2] = {Atomic(slot.followed[0]).load(std::memory_order_relaxed),
                               Atomic(slot.followed[1]).load(std::memory_order_relaxed)};
  const int last = ngram_followed(at, slot.length);
  const Candidates found = find_candidates(p, slot, ngram_follow(p.index, at[last], slot.length));
  if (found.count > 0) Atomic(slot.followed[1 - last]).store({found.best, slot.length}, std::memory_order_relaxed);
  return found;
}

// A node that may be added next: the candidates that agree on the path to it.
struct OpenNode {
  uint32_t members;  // bit i: candidate i
  int32_t token;
  int32_t parent, depth;
  int match;  // longest match of its candidates
  uint64_t weight;
  int32_t log2_p;  // before subtracting the total weight's log2
};

struct OpenNodes {  // disjoint members, so at most as many as candidates
  OpenNode at[kNgramCandidates];
  uint32_t rank[kNgramCandidates];
  int count = 0;

  int best() const {
    int best = 0;
    for (int i = 1; i < count; ++i) best = rank[i] > rank[best] ? i : best;
    return best;
  }

  void remove(int i) {
    --count;
    at[i] = at[count];
    rank[i] = rank[count];
  }

  // Add the children of a node: one per distinct next token of its members.
  void add_children(const NgramDraftParams& p, const Candidates& c, uint32_t members, int32_t node, int32_t depth) {
    const int begin = count;
    for (; members != 0; members &= members - 1) {
      const int i = std::countr_zero(members);
      const int32_t token = ngram_token(c.at[i].next);
      if (token < 0) continue;
      int child = begin;
      while (child < count && at[child].token != token) ++child;
      if (child == count) at[count++] = {0, token, node, depth, 0, 0, 0};
      at[child].members |= 1u << i;
      at[child].weight += c.at[i].weight;
      at[child].match = std::max(at[child].match, c.at[i].match);
    }
    for (int i = begin; i < count; ++i) {
      at[i].log2_p = ngram_log2(at[i].weight) - depth * p.step[at[i].match];
      rank[i] = ngram_rank(at[i].log2_p, ngram_tie(at[i].match, std::countr_zero(at[i].members)));
    }
  }
};

// Grow the tree of a row below its root and return the number of nodes.
int32_t grow_tree(const NgramDraftParams& p, Candidates& c, int32_t* tokens, int32_t* parents, float* scores) {
  OpenNodes open;
  uint64_t total = 0;
  for (int i = 0; i < c.count; ++i) total += c.at[i].weight;
  const int32_t log2_total = total > 0 ? ngram_log2(total) : 0;
  open.add_children(p, c, static_cast<uint32_t>((uint64_t{1} << c.count) - 1), 0, 1);
  int32_t used = 1;
  for (; open.count > 0 && used < p.out.nodes; ++used) {
    const int first = open.best();
    const OpenNode best = open.at[first];
    const int32_t log2_p = best.log2_p - log2_total;
    if (log2_p < p.min_log2_p) break;  // all others are lower
    tokens[used] = best.token;
    parents[used] = best.parent;
    scores[used] = ngram_score(log2_p);
    if (p.chain)
      open.count = 0;
    else
      open.remove(first);
    for (uint32_t m = best.members; m != 0; m &= m - 1) ngram_forward(p.index, c.at[std::countr_zero(m)].next);
    open.add_children(p, c, best.members, used, best.depth + 1);
  }
  return used;
}

// Return the value in units of 1 / `unit`.
uint32_t fixed_point(double value, uint32_t unit) { return static_cast<uint32_t>(std::llround(value * unit)); }

NgramWeights checked_weights(Check& check, double own, double group, double global, double recency) {
  const auto weight = [&](const char* name, double value) {
    check.that(value >= 0 && value <= 256, name, {"is ", value}, "0 to 256");
    return fixed_point(value, 16);
  };
  NgramWeights weights{
      .own = weight("own_weight", own),
      .group = weight("group_weight", group),
      .global = weight("global_weight", global),
      .recency = {},
  };
  check.that(recency > 0 && recency <= 1, "recency", {"is ", recency}, "above 0, at most 1");
  double power = 1;
  for (uint32_t& occurrence_weight : weights.recency) {
    occurrence_weight = recency == 1 ? 256 : fixed_point(power, 256);  // the common case, and faster
    power *= recency;
  }
  return weights;
}

int32_t in_log2(double value) { return static_cast<int32_t>(std::lround(std::log2(value) * (1 << kNgramLogBits))); }

using Steps = std::array<int32_t, kNgramMaxMatch + 1>;

// Return the cost per token of a path, by match. Computed once: 33 logarithms take as long as half a lookup.
const Steps& path_steps() {
  static const Steps steps = [] {
    Steps made;
    for (int match = 0; match <= kNgramMaxMatch; ++match) made[match] = in_log2((match + 4.0) / (match + 2.0));
    return made;
  }();
  return steps;
}

void count(uint64_t& counter, uint64_t by) { std::atomic_ref(counter).fetch_add(by, std::memory_order_relaxed); }

}  // namespace

void NgramIndex::draft(const OptTensor& slots, const TensorView& seq_lens, int64_t num_nodes, bool chain,
                       double min_prob, int64_t min_match, double own_weight, double group_weight, double global_weight,
                       double recency, const TensorView& out_tokens, const TensorView& out_parents,
                       const TensorView& out_positions, const TensorView& out_first_child,
                       const TensorView& out_next_sibling, const TensorView& out_mask, const TensorView& out_num_nodes,
                       const TensorView& out_scores, const TensorView& out_match_len) {
  Check check = index_check("ngram_draft");
  Dim B{"batch"}, N{"num_nodes", num_nodes}, S{"num_slots", view_.num_slots};
  check.tensor("slots", slots, {B}, kInt32);
  check.tensor("seq_lens", seq_lens, {B}, kInt32);
  check.slots(slots, B, S);
  require_own_device(check);
  check.range("num_nodes", N, 1, tree::kMaxTreeNodes);
  check.that(min_prob >= 0 && min_prob <= 1, "min_prob", {"is ", min_prob}, "0 to 1");
  check.range("min_match", min_match, 0, kNgramMaxMatch);
  const NgramWeights weights = checked_weights(check, own_weight, group_weight, global_weight, recency);
  constexpr tree::TreeNames kNames{"out.tree.tokens",      "out.tree.parents",      "out.tree.positions",
                                   "out.tree.first_child", "out.tree.next_sibling", "out.tree.mask",
                                   "out.tree.num_nodes"};
  const tree::TreeOut out = tree::check_tree_out(check, kNames, B, N, out_tokens, out_parents, out_positions,
                                                 out_first_child, out_next_sibling, out_mask, out_num_nodes);
  check.output("out.scores", out_scores, {B, N}, kFloat32);
  check.output("out.match_len", out_match_len, {B}, kInt32);

  NgramDraftParams params{
      .index = view_,
      .slots = data_or_null<const int32_t>(slots),
      .seq_lens = seq_lens.data<const int32_t>(),
      .out = out,
      .out_scores = out_scores.data<float>(),
      .out_match_len = out_match_len.data<int32_t>(),
      .batch = B,
      .chain = chain,
      .min_log2_p = min_prob > 0 ? in_log2(min_prob) : std::numeric_limits<int32_t>::min(),
      .min_match = static_cast<int32_t>(min_match),
      .weights = weights,
      .step = {},
  };
  std::copy(path_steps().begin(), path_steps().end(), params.step);
  const std::shared_lock lock(mutex_);
  if (check.on_cuda()) {
    if (B > 0) SD_RUN_CUDA(check, CallStream{}, ngram_draft, params);
    return;
  }
  workers_.run((B + kRowsTogether - 1) / kRowsTogether, [&](int64_t i) {
    ngram_draft_cpu(params, i * kRowsTogether, std::min<int64_t>(B, (i + 1) * kRowsTogether));
  });
  uint64_t drafts = 0, matches = 0, drafted = 0;
  for (int64_t b = 0; b < B; ++b) {
    const int32_t nodes = out.num_nodes[b];
    if (nodes == 0) continue;
    ++drafts;
    matches += params.out_match_len[b] > 0;
    drafted += nodes - 1;
  }
  count(view_.header->drafts, drafts);
  count(view_.header->matches, matches);
  count(view_.header->drafted, drafted);
}

void ngram_draft_cpu(const NgramDraftParams& p, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    float* scores = p.out_scores + b * p.out.nodes;
    std::fill_n(scores, p.out.nodes, -std::numeric_limits<float>::infinity());
    p.out_match_len[b] = 0;
    int32_t tokens[tree::kMaxTreeNodes], parents[tree::kMaxTreeNodes];
    tree::TreeRow row{{}, tokens, parents};

    const int64_t slot_index = slot_of(p.slots, b, p.index.num_slots);
    NgramSlot* slot = slot_index < 0 ? nullptr : p.index.slots + slot_index;
    if (slot && slot->live && slot->length > 0) {
      Candidates candidates = follow_candidates(p, *slot);
      row.root_token = tokens[0] = slot->tail[(slot->length - 1) % kNgramMaxMatch];
      parents[0] = -1;
      scores[0] = 0;
      row.count = grow_tree(p, candidates, tokens, parents, scores);
      row.seq_len = p.seq_lens[b];
      p.out_match_len[b] = candidates.longest_match;
    }
    write_row(p.out, b, row);
  }
}

}  // namespace specdec::ngram
