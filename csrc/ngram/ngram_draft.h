// NgramIndex::draft: what both halves share.
//
// Candidates are places where the context's last n tokens stood: longest n first, then scope by scope (the stream's
// own, its group's, everybody's), newest first, each place once, 32 at most. A place's match is verified backwards
// against the stored text (up to 32 tokens), and one shorter than n, or of another scope, is a hash collision. Its
// weight is 2^min(match, 24), times that of its scope or of the request's own text, times that of its age.
//
// A node is the set of candidates that agree on the path to it; its children are the groups of their next tokens.
// p(child) = p * sum w(group) / sum w(node) telescopes to w(node) / w(root), so the order is one of integers, the same
// on every device. A candidate whose text ends keeps its share: nobody knows what came next. The tree grows best first:
// larger weight, then longer best match, then the earliest candidate; no two open nodes share a candidate.
#pragma once

#include "core/dispatch.h"
#include "core/exact_math.h"
#include "ngram/layout.h"
#include "tree/tree_rows.h"

namespace specdec {

struct NgramDraftParams {
  NgramView index;
  const int32_t* slots;     // [batch] or null
  const int32_t* seq_lens;  // [batch]
  TreeOut out;
  float* out_scores;       // [batch, nodes]
  int32_t* out_match_len;  // [batch]
  int64_t batch;
  bool chain;
  double min_prob;
  int32_t min_match;
  NgramWeights weights;
};

// A place that the table names.
struct NgramPlace {
  uint32_t position;
  uint32_t scope;
  int32_t order;
  int32_t age;  // how many places of its n-gram are newer
};

struct NgramCandidate {
  NgramCursor next;  // its next token
  uint64_t weight;   // 0: none after all
  int32_t match;
};

// The scopes a stream looks into, where a place could have a weight: its own first, everybody's last.
SD_HD int ngram_find_scopes(const NgramSlot& slot, const NgramWeights& weights, uint32_t (&scopes)[kNgramScopes]) {
  int count = 0;
  const auto look = [&](uint32_t scope, uint32_t weight) {
    if (weight > 0 || (scope == slot.scope && weights.own > 0)) scopes[count++] = scope;
  };
  if (slot.scope >= kNgramPrivate) look(slot.scope, 0);
  if (slot.group != kNgramGlobal) look(slot.group, weights.group);
  look(kNgramGlobal, weights.global);
  return count;
}

// What a place is worth to a stream, whose last tokens are `context`, newest first. (A GPU compares with a warp.)
SD_HD NgramCandidate ngram_verify(const NgramDraftParams& p, const NgramPlace& place, uint32_t stream,
                                  const int32_t* context, int context_len) {
  NgramCandidate found{ngram_cursor(p.index, place.position), 0, 0};
  if (!found.next.block || found.next.block->scope != place.scope) return found;  // overwritten, or another n-gram
  found.match = ngram_match(p.index, found.next, context, context_len);
  if (found.match >= 1 << place.order && found.match >= p.min_match)
    found.weight = ngram_weight(p.weights.of(found.next.block->owner, place.scope, stream),
                                p.weights.recency[place.age], found.match);
  return found;
}

// Of open nodes, the one of the largest rank goes first: by weight, then match, then the earliest candidate, so that
// no two are equal.
SD_HD uint64_t ngram_rank(uint64_t weight, int match, int first) {
  return weight << 11 | static_cast<uint64_t>(match) << 5 | static_cast<uint64_t>(kNgramCandidates - 1 - first);
}

SD_HD double ngram_probability(uint64_t weight, uint64_t total) {
  return div(static_cast<double>(weight), static_cast<double>(total));
}
SD_HD float ngram_score(double probability) {
  constexpr float kLn2 = 0x1.62e43p-1f;
  return mul(log2_of(static_cast<float>(probability)), kLn2);
}

// The rows from `begin` to `end`.
void ngram_draft_cpu(const NgramDraftParams& p, int64_t begin, int64_t end);
void ngram_draft_cuda(const NgramDraftParams& p, Stream stream);

}  // namespace specdec
