// ngram_draft on a GPU: smem of a row's block, and the request as each warp knows it.
#pragma once

#include "core/slots.h"
#include "core/warp.cuh"
#include "ngram/ngram_draft.h"
#include "tree/tree_nodes.cuh"

namespace specdec::ngram::draft {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kOctet = 8;                               // lanes that hold a block, 16 bytes each
constexpr int kParallel = kThreads / kOctet;            // occurrences verified at a time
constexpr int kMaxOccurrences = 3 * kParallel;          // occurrences that may be verified
constexpr int kNgrams = kNgramOrders * kNgramScopes;    // n-grams looked up
constexpr int kMaxSegments = 2 * kNgramCandidates - 1;  // edges of a trie of that many texts
constexpr int kHead = kWarp - kNgramBlockTokens;        // words of a block before its tokens
static_assert(kNgrams < kWarps && kNgramMaxOccurrences <= kMaxOccurrences && kNgramCandidates == kWarp &&
              kNgramMaxMatch == kWarp);
static_assert(sizeof(NgramSet) == kWarp * sizeof(uint4) && sizeof(NgramBlock) == kOctet * sizeof(uint4));
static_assert(kThreads >= tree::kMaxTreeNodes && tree::kMaxTreeNodes <= 256);  // indices and depths are bytes

__device__ __forceinline__ int first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

struct alignas(16) Candidate {
  uint64_t weight;
  int32_t match;
  int32_t length;  // tokens of the continuation
};

// Consecutive nodes whose paths the same candidates share. No two segments have the same candidates.
struct alignas(16) Segment {
  int32_t log2_w, step;  // of the candidates' weight, and the reduction per depth
  uint32_t per_step;     // 2^32 / step
  uint32_t tie;
  int32_t start, length;  // depths
  uint32_t owner;         // first of the candidates

  __device__ int32_t log2_p(int depth) const { return log2_w - depth * step; }
  // Count its nodes with at least this log2 p.
  __device__ int nodes_from(int32_t least) const {
    const int32_t room = log2_w - least;
    const int depth = room < 0 ? 0 : static_cast<int>(__umulhi(static_cast<uint32_t>(room), per_step));
    return min(max(depth - start, 0), length);
  }
};

// Return the key of a node: its depth and the first candidate on the path to it. 0: the root.
__device__ __forceinline__ uint32_t node_key(uint32_t owner, int depth) {
  return depth == 0 ? 0 : owner << 8 | static_cast<uint32_t>(depth);
}

struct Occurrences {
  uint4 set[kNgrams][kWarp];
  // The followed one, then those of the n-grams: longest n first, then by scope, newest first.
  alignas(16) uint32_t position[kMaxOccurrences];
  uint32_t scope[kNgrams];
  int32_t min_match[kNgrams];  // minimum match
  bool good[kMaxOccurrences];
};

template <int kWords>
struct Row {
  // Nodes at or above a bound: each segment may have one at it.
  static constexpr int kMaxListed = 64 * kWords + kMaxSegments;
  static constexpr int kListedParts = (kMaxListed + kWarp - 1) / kWarp;

  __device__ int32_t log2_total() const { return segment[kMaxSegments].log2_w; }

  int32_t context[kNgramMaxMatch];
  int32_t longest_match, segments;
  Candidate candidate[kNgramCandidates];
  uint32_t position[kNgramCandidates];
  // The continuation of each; four more words let lanes read different ones without bank conflicts.
  alignas(16) int32_t text[kNgramCandidates][64 * kWords + 4];
  uint8_t shared[kNgramCandidates]
                [kNgramCandidates];   // common prefix length of two continuations; with itself: its length
  uint32_t leaves[kNgramCandidates];  // key of the node below which it is the first candidate of its path
  Segment segment[kMaxSegments + 1];
  union {
    uint64_t weight[kMaxSegments + 1];  // of the segments, then of all candidates; used first
    uint32_t listed_rank[kMaxListed];
  };
  uint16_t listed_key[kMaxListed];
  uint16_t listed[64 * kWords];  // index in the list of each node
  union {
    Occurrences occurrences;                            // used first
    uint8_t node_index[kNgramCandidates][64 * kWords];  // index of the node with that key
    tree::TreeNodes<kWords> nodes;                      // used last
  };
};

// The request, in every warp.
struct Request {
  NgramSlot* slot;
  uint32_t stream, scope, group, length;
  NgramFollowed followed[2];
  int32_t context;  // in lane m: its m-th token from the end
  int context_len;  // 0: no context
};

__device__ __forceinline__ Request find_request(const NgramDraftParams& p, int64_t row) {
  const int64_t slot = slot_of(p.slots, row, p.index.num_slots);
  if (slot < 0) return {};
  NgramSlot& record = p.index.slots[slot];
  const int32_t tail = record.tail[lane_id()];
  const uint4 followed = reinterpret_cast<const uint4&>(record.followed);
  const uint32_t length = record.live ? record.length : 0;
  const auto from = static_cast<int>((length - 1 - static_cast<uint32_t>(lane_id())) % kNgramMaxMatch);
  return {.slot = &record,
          .stream = record.stream,
          .scope = record.scope,
          .group = record.group,
          .length = length,
          .followed = {{followed.x, followed.y}, {followed.z, followed.w}},
          .context = __shfl_sync(kFullMask, tail, from),
          .context_len = static_cast<int>(length < kNgramMaxMatch ? length : kNgramMaxMatch)};
}

}  // namespace specdec::ngram::draft
