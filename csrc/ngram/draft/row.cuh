// What the block of a row keeps in shared memory, and what each of its warps knows of the request.
#pragma once

#include "core/slots.h"
#include "core/warp.cuh"
#include "ngram/ngram_draft.h"
#include "tree/tree_nodes.cuh"

namespace specdec::ngram::draft {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kOctet = 8;                                // lanes that hold a block, 16 bytes each
constexpr int kTogether = kThreads / kOctet;             // places verified at a time
constexpr int kMostPlaces = 3 * kTogether;               // that may be verified
constexpr int kNgrams = kNgramOrders * kNgramScopes;     // that are looked up
constexpr int kMostSegments = 2 * kNgramCandidates - 1;  // edges of a trie of so many texts
constexpr int kHead = kWarp - kNgramBlockTokens;         // words of a block before its tokens
static_assert(kNgrams < kWarps && kNgramPlaces <= kMostPlaces && kNgramCandidates == kWarp && kNgramMaxMatch == kWarp);
static_assert(sizeof(NgramSet) == kWarp * sizeof(uint4) && sizeof(NgramBlock) == kOctet * sizeof(uint4));
static_assert(kThreads >= tree::kMaxTreeNodes && tree::kMaxTreeNodes <= 256);  // numbers and depths are bytes

__device__ __forceinline__ int first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

struct alignas(16) Candidate {
  uint64_t weight;
  int32_t match;
  int32_t length;  // tokens that follow
};

// Nodes one behind the other, on whose paths the same candidates agree. No two segments' are the same.
struct alignas(16) Segment {
  int32_t log2_w, step;  // of the candidates, and what a depth takes from it
  uint32_t per_step;     // 2^32 / step
  uint32_t tie;
  int32_t start, length;  // depths
  uint32_t owner;         // the first of the candidates

  __device__ int32_t log2_p(int depth) const { return log2_w - depth * step; }
  // How many of its nodes have at least this log2 p.
  __device__ int nodes_from(int32_t least) const {
    const int32_t room = log2_w - least;
    const int depth = room < 0 ? 0 : static_cast<int>(__umulhi(static_cast<uint32_t>(room), per_step));
    return min(max(depth - start, 0), length);
  }
};

// The name of a node: its depth, and the first candidate on the path to it. 0: the root.
__device__ __forceinline__ uint32_t name_of(uint32_t owner, int depth) {
  return depth == 0 ? 0 : owner << 8 | static_cast<uint32_t>(depth);
}

struct Places {
  uint4 set[kNgrams][kWarp];
  // The one followed, then those of the n-grams: longest n first, then scope by scope, newest first.
  alignas(16) uint32_t position[kMostPlaces];
  uint32_t scope[kNgrams];
  int32_t least[kNgrams];  // their match
  bool good[kMostPlaces];
};

template <int kWords>
struct Row {
  // Nodes at or above a bound: each segment has one at it.
  static constexpr int kMostListed = 64 * kWords + kMostSegments;
  static constexpr int kListedParts = (kMostListed + kWarp - 1) / kWarp;

  __device__ int32_t log2_total() const { return segment[kMostSegments].log2_w; }

  int32_t context[kNgramMaxMatch];
  int32_t longest, segments;
  Candidate candidate[kNgramCandidates];
  uint32_t position[kNgramCandidates];
  // What follows each; four words more let lanes that read different ones do so at once.
  alignas(16) int32_t text[kNgramCandidates][64 * kWords + 4];
  uint8_t shared[kNgramCandidates][kNgramCandidates];  // how many tokens of it two of them share; one with itself: all
  uint32_t leaves[kNgramCandidates];  // the name of the node behind which it is the first of its path's candidates
  Segment segment[kMostSegments + 1];
  union {
    uint64_t weight[kMostSegments + 1];  // of the segments, then of all candidates: first
    uint32_t listed_rank[kMostListed];
  };
  uint16_t listed_name[kMostListed];
  uint16_t listed[64 * kWords];  // where the node of that number is
  union {
    Places places;                                  // first
    uint8_t number[kNgramCandidates][64 * kWords];  // of the node of that name
    tree::TreeNodes<kWords> nodes;                  // last
  };
};

// What a lookup knows of its request, in every warp.
struct Request {
  NgramSlot* slot;
  uint32_t stream, scope, group, length;
  NgramFollowed followed[2];
  int32_t context;  // of lane m: its m-th token from the end
  int context_len;  // 0: there is none
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
