// NgramIndex::draft: definitions shared by CPU and GPU.
//
// Candidates are earlier occurrences of the context's last n tokens: longest n first, then by scope (private, group,
// global), newest first, each occurrence once, at most 32. The match of an occurrence is verified backwards against the
// stored text (up to 32 tokens); a match shorter than n, or in another scope, is a hash collision. The weight of a
// candidate is 2^min(match, 24), times the weight of its scope or of the request's own text, times the weight of its
// recency.
//
// The first candidate is the occurrence that matched furthest at the last draft, advanced by the tokens that the stream
// has gained, even if those differ: a text that follows another mostly goes on following it, also after a differing
// token. No hash would find such an occurrence, or one within a run of a token longer than any n.
//
// A node is the set of candidates that agree on the path to it; its children are the groups of their next tokens. Its
// share is w(node) / w(root); a candidate whose text ends keeps its own weight, since what came next is unknown. The
// probability that the text continues like any candidate at all is (m + 2) / (m + 4) per token, with m the longest
// match: the posterior mean of a rule that held m times under a Beta(2, 2) prior. p(node) = share * that to the power
// of its depth.
//
// The tree grows best first: larger p, then longer match, then the earliest candidate. Logarithms in integer multiples
// of 1/256 make that an integer order, equal on every device. Shares and matches decrease along a path, so p does,
// strictly; and no two open nodes share a candidate, so no two nodes are equal.
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
  int32_t min_log2_p;  // minimum of a node, in 1/256
  int32_t min_match;
  NgramWeights weights;
  int32_t step[kNgramMaxMatch + 1];  // reduction of log2 p per token of a path, by match
};

// An occurrence listed in the table.
struct NgramOccurrence {
  uint32_t position;
  uint32_t scope;
  int32_t min_match;  // its minimum match unless it is a collision
  int32_t age;        // number of newer occurrences of its n-gram
};

struct NgramCandidate {
  NgramCursor next;  // its next token
  uint64_t weight;   // 0: rejected
  int32_t match;
};

// Return the scopes that a stream reads and that could have a weight: private first, global last.
SD_HD int ngram_find_scopes(const NgramSlot& slot, const NgramWeights& weights, uint32_t (&scopes)[kNgramScopes]) {
  int count = 0;
  for (uint32_t& scope : scopes) scope = kNgramGlobalScope;
  const auto look = [&](uint32_t scope, uint32_t weight) {
    if (weight == 0 && (scope != slot.scope || weights.own == 0)) return;
    SD_UNROLL
    for (int i = 0; i < kNgramScopes; ++i) scopes[i] = i == count ? scope : scopes[i];  // stays in registers
    ++count;
  };
  if (slot.scope >= kNgramPrivateScope) look(slot.scope, 0);
  if (slot.group != kNgramGlobalScope) look(slot.group, weights.group);
  look(kNgramGlobalScope, weights.global);
  return count;
}

// Return whether a stream reads texts of that scope.
SD_HD bool ngram_sees(uint32_t own, uint32_t group, uint32_t scope) {
  return scope == kNgramGlobalScope || scope == own || scope == group;
}

// Verify an occurrence for a stream whose last tokens are `context`, newest first, and weigh it. (A GPU compares with a
// warp.)
SD_HD NgramCandidate ngram_verify(const NgramDraftParams& p, const NgramOccurrence& occurrence, uint32_t stream,
                                  const int32_t* context, int context_len) {
  NgramCandidate found{ngram_cursor(p.index, occurrence.position), 0, 0};
  if (!found.next.block || found.next.block->scope != occurrence.scope) return found;  // overwritten, or another n-gram
  if (ngram_token(found.next) < 0) return found;
  found.match = ngram_match(p.index, found.next, context, context_len);
  if (found.match >= occurrence.min_match && found.match >= p.min_match)
    found.weight = ngram_weight(p.weights.of(found.next.block->owner, occurrence.scope, stream),
                                p.weights.recency[occurrence.age], found.match);
  return found;
}

constexpr int kNgramLogBits = 8;

// Return log2 of a positive number in 1/256, rounded down.
SD_HD int32_t ngram_log2(uint64_t x) {
  const int log = highest_bit(x);
  auto mantissa = static_cast<uint32_t>(x << (63 - log) >> 32);
  int32_t found = log;
  for (int i = 0; i < kNgramLogBits; ++i) {  // squaring shifts one more bit of the log2 before the point
    const uint64_t square = static_cast<uint64_t>(mantissa) * mantissa;
    const auto above = static_cast<int32_t>(square >> 63);
    mantissa = static_cast<uint32_t>(square >> (31 + above));
    found = found * 2 + above;
  }
  return found;
}

// Rank of a node; the largest goes first: log2 p, then the match, then the earliest candidate.
constexpr int kNgramTieBits = 11;
constexpr int32_t kNgramRankBase = 1 << 16;  // exceeds the reduction of 256 steps
SD_HD uint32_t ngram_tie(int match, int first) {
  return static_cast<uint32_t>(match) << 5 | static_cast<uint32_t>(kNgramCandidates - 1 - first);
}
SD_HD uint32_t ngram_rank(int32_t log2_p, uint32_t tie) {
  return static_cast<uint32_t>(kNgramRankBase + log2_p) << kNgramTieBits | tie;
}

// Return log p of a log2 p in 1/256.
SD_HD float ngram_score(int32_t log2_p) {
  constexpr float kUnit = 0x1.62e43p-1f / (1 << kNgramLogBits);
  return mul(static_cast<float>(log2_p), kUnit);
}

// Draft the rows from `begin` to `end`.
void ngram_draft_cpu(const NgramDraftParams& p, int64_t begin, int64_t end);
void ngram_draft_cuda(const NgramDraftParams& p, Stream stream);

}  // namespace specdec::ngram
