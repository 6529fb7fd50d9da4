// NgramIndex::draft: what both halves share.
//
// Candidates are places where the context's last n tokens stood: longest n first, then scope by scope (the stream's
// own, its group's, everybody's), newest first, each place once, 32 at most. A place's match is verified backwards
// against the stored text (up to 32 tokens), and one shorter than n, or of another scope, is a hash collision. Its
// weight is 2^min(match, 24), times that of its scope or of the request's own text, times that of its age.
//
// Before them all comes the place that agreed furthest at the last draft, as many tokens further on as the stream has
// grown, even if they do not agree: what follows a text mostly goes on following it, also behind a token that is
// another. No hash would find such a place, or one in a run of a token that is longer than any n.
//
// A node is the set of candidates that agree on the path to it; its children are the groups of their next tokens. Its
// share is w(node) / w(root); a candidate whose text ends keeps its own, as nobody knows what came next. That the text
// goes on like one of them at all is as likely, for each token, as (m + 2) / (m + 4) after the m tokens of the longest
// match: what a rule that held m times is worth to one who knew nothing before (a prior of Beta(2, 2)).
// p(node) = share * that to the power of its depth.
//
// The tree grows best first: larger p, then longer match, then the earliest candidate. Logarithms in whole 1/256 make
// that an order of integers, the same on every device. Shares and matches fall along a path, so p does, strictly; and
// no two open nodes share a candidate, so no two nodes are equal.
#pragma once

#include "core/bits.h"
#include "core/dispatch.h"
#include "core/exact_math.h"
#include "ngram/layout.h"
#include "tree/tree_rows.h"

namespace specdec::ngram {

struct NgramDraftParams {
  NgramView index;
  const int32_t* slots;     // [batch] or null
  const int32_t* seq_lens;  // [batch]
  tree::TreeOut out;
  float* out_scores;       // [batch, nodes]
  int32_t* out_match_len;  // [batch]
  int64_t batch;
  bool chain;
  int32_t min_log2_p;  // of a node, in 1/256
  int32_t min_match;
  NgramWeights weights;
  int32_t step[kNgramMaxMatch + 1];  // what each token of a path takes from the log2 of its p, by match
};

// A place that the table names.
struct NgramPlace {
  uint32_t position;
  uint32_t scope;
  int32_t least;  // its match, if it is no collision
  int32_t age;    // how many places of its n-gram are newer
};

struct NgramCandidate {
  NgramCursor next;  // its next token
  uint64_t weight;   // 0: none after all
  int32_t match;
};

// The scopes a stream looks into, where a place could have a weight: its own first, everybody's last.
SD_HD int ngram_find_scopes(const NgramSlot& slot, const NgramWeights& weights, uint32_t (&scopes)[kNgramScopes]) {
  int count = 0;
  for (uint32_t& scope : scopes) scope = kNgramGlobal;
  const auto look = [&](uint32_t scope, uint32_t weight) {
    if (weight == 0 && (scope != slot.scope || weights.own == 0)) return;
    SD_UNROLL
    for (int i = 0; i < kNgramScopes; ++i) scopes[i] = i == count ? scope : scopes[i];  // stays in registers
    ++count;
  };
  if (slot.scope >= kNgramPrivate) look(slot.scope, 0);
  if (slot.group != kNgramGlobal) look(slot.group, weights.group);
  look(kNgramGlobal, weights.global);
  return count;
}

// Whether a stream looks into texts of that scope.
SD_HD bool ngram_sees(uint32_t own, uint32_t group, uint32_t scope) {
  return scope == kNgramGlobal || scope == own || scope == group;
}

// What a place is worth to a stream, whose last tokens are `context`, newest first. (A GPU compares with a warp.)
SD_HD NgramCandidate ngram_verify(const NgramDraftParams& p, const NgramPlace& place, uint32_t stream,
                                  const int32_t* context, int context_len) {
  NgramCandidate found{ngram_cursor(p.index, place.position), 0, 0};
  if (!found.next.block || found.next.block->scope != place.scope) return found;  // overwritten, or another n-gram
  if (ngram_token(found.next) < 0) return found;
  found.match = ngram_match(p.index, found.next, context, context_len);
  if (found.match >= place.least && found.match >= p.min_match)
    found.weight = ngram_weight(p.weights.of(found.next.block->owner, place.scope, stream),
                                p.weights.recency[place.age], found.match);
  return found;
}

constexpr int kNgramLogBits = 8;

// log2 in 1/256 of a number above 0, rounded down.
SD_HD int32_t ngram_log2(uint64_t x) {
  const int log = highest_bit(x);
  auto mantissa = static_cast<uint32_t>(x << (63 - log) >> 32);
  int32_t found = log;
  for (int i = 0; i < kNgramLogBits; ++i) {  // of its square, the log2 has one bit more before the point
    const uint64_t square = static_cast<uint64_t>(mantissa) * mantissa;
    const auto above = static_cast<int32_t>(square >> 63);
    mantissa = static_cast<uint32_t>(square >> (31 + above));
    found = found * 2 + above;
  }
  return found;
}

// Of nodes, the one of the largest rank goes first: log2 p, then the match, then the earliest candidate.
constexpr int kNgramTieBits = 11;
constexpr int32_t kNgramRankBase = 1 << 16;  // above what 256 steps take
SD_HD uint32_t ngram_tie(int match, int first) {
  return static_cast<uint32_t>(match) << 5 | static_cast<uint32_t>(kNgramCandidates - 1 - first);
}
SD_HD uint32_t ngram_rank(int32_t log2_p, uint32_t tie) {
  return static_cast<uint32_t>(kNgramRankBase + log2_p) << kNgramTieBits | tie;
}

// log p of log2 p in 1/256.
SD_HD float ngram_score(int32_t log2_p) {
  constexpr float kUnit = 0x1.62e43p-1f / (1 << kNgramLogBits);
  return mul(static_cast<float>(log2_p), kUnit);
}

// The rows from `begin` to `end`.
void ngram_draft_cpu(const NgramDraftParams& p, int64_t begin, int64_t end);
void ngram_draft_cuda(const NgramDraftParams& p, Stream stream);

}  // namespace specdec::ngram
