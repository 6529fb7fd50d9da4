// One block a row; every step is as wide as it can be, since what takes time is steps that wait for one another.
//
// A warp finds the places of a scope: slot number, slot record and sets are three loads in a row, and sets are read
// whole (512 bytes), so that finding an entry and reading its positions is one of them. Then a warp takes a place, the
// 32 words of its block at once, and compares all 32 tokens in one step; then a warp takes a candidate and copies what
// follows, so that nothing is read from memory while the tree grows.
//
// Nor does the tree grow node by node. Along a path where no candidate leaves, log2 p falls by the same step from node
// to node: such a segment, of which 32 candidates have at most 63, holds as many nodes above a bound as a division
// says. So the bound that leaves enough nodes is found by bisection, and a node's number by counting over the segments
// what is better. A segment ends where one of its candidates parts from another, so what is needed of the texts is how
// long any two agree.
//
// Floor: 4 loads that wait for one another, 5 or 6 where a match or a draft leaves its block, of 0.6 to 0.8 us from
// memory.
#include "core/slots.h"
#include "ngram/append.h"
#include "ngram/ngram_draft.h"
#include "tree/tree_nodes.cuh"

namespace specdec {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kOctet = kNgramWays;                          // lanes for an order's set
constexpr int kMostSegments = 2 * kNgramCandidates - 1;     // edges of a trie of so many texts
constexpr int kMostListed = kMaxTreeNodes + kMostSegments;  // nodes at or above a bound: each segment has one at it
constexpr int kHead = kWarp - kNgramBlockTokens;            // words of a block before its tokens
static_assert(kNgramOrders * kOctet == kWarp && kNgramCandidates == kWarp && kNgramMaxMatch == kWarp);
static_assert(sizeof(NgramBlock) == kWarp * sizeof(int32_t) && offsetof(NgramBlock, tokens) == kHead * sizeof(int32_t));

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ __forceinline__ int first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

// A block of the store in the registers of a warp, a word a lane.
struct BlockWords {
  int32_t word;
  bool held;  // not overwritten

  __device__ uint32_t head(int i) const { return static_cast<uint32_t>(__shfl_sync(kFullMask, word, i)); }
  __device__ int32_t token(int offset) const { return __shfl_sync(kFullMask, word, (kHead + offset) % kWarp); }
};

__device__ __forceinline__ BlockWords load_block(const NgramView& v, uint32_t id) {
  const uint32_t index = id & ((1u << v.block_bits) - 1);
  if (index >= v.num_blocks) return {0, false};
  const int32_t word = reinterpret_cast<const int32_t*>(v.blocks + index)[lane_id()];
  return {word, static_cast<uint32_t>(__shfl_sync(kFullMask, word, 0)) == id};
}

// The block that a link of block `from` leads to, if that one links back.
__device__ __forceinline__ BlockWords follow(const NgramView& v, const BlockWords& block, int link, int back) {
  BlockWords other = load_block(v, block.head(link));
  other.held = other.held && other.head(back) == block.head(0);
  return other;
}
constexpr int kPrev = 3, kNext = 4;

__device__ __forceinline__ void prefetch_block(const NgramView& v, uint32_t id) {
  const uint32_t index = id & ((1u << v.block_bits) - 1);
  if (index < v.num_blocks) asm volatile("prefetch.global.L2 [%0];" ::"l"(v.blocks + index));
}

struct Candidate {
  uint32_t position;
  int32_t match;
  uint64_t weight;
};

struct Segment {          // nodes one behind the other, on whose paths the same candidates agree
  uint32_t group;         // the candidates; no other segment's
  uint32_t parent;        // that of the segment it hangs off, 0: the root
  int32_t start, length;  // depths
};

struct Row {
  int32_t places, candidates, longest, log2_total, segments, count;
  uint32_t held[kNgramScopes];  // byte o: how many places order o has in this scope
  union {
    struct {
      NgramPlace place[kNgramPlaces];
      int32_t match[kNgramPlaces];
      uint64_t weight[kNgramPlaces];
    } found;
    struct {  // later
      int32_t number[kMostListed];
      int32_t token[kMaxTreeNodes], parent[kMaxTreeNodes], log2_p[kMaxTreeNodes];
    } node;
  };
  Candidate candidate[kNgramCandidates];
  int32_t length[kNgramCandidates];  // tokens that follow
  Segment segment[kMostSegments];
  int32_t log2_w[kMostSegments], step[kMostSegments], above[kMostSegments];  // the segment it hangs off, -1: the root
  uint32_t per_step[kMostSegments], tie[kMostSegments];                      // 2^32 / step
  int32_t first[kMostSegments], kept[kMostSegments];                         // of its nodes, in the list
};

constexpr int kAhead = 4;  // depths compared together

template <int kWords>
struct Continuations {
  int32_t tokens[64 * kWords + kAhead][kNgramCandidates];
  // How many tokens the texts of two candidates share; of one with itself, all it has. Rows in different banks.
  int32_t shared[kNgramCandidates][kNgramCandidates + 1];
};

// What a lookup knows of its request, in every warp.
struct Request {
  uint32_t stream, scope, group;
  int32_t context;  // of lane m: its m-th token from the end
  int context_len;  // 0: there is none
};

__device__ __forceinline__ Request find_request(const NgramDraftParams& p, int64_t row) {
  const int64_t slot = slot_of(p.slots, row, p.index.num_slots);
  if (slot < 0) return {0, 0, 0, 0, 0};
  const NgramSlot& record = p.index.slots[slot];
  const int32_t tail = record.tail[lane_id()];
  const uint32_t length = record.live ? record.length : 0;
  const auto from = static_cast<int>((length - 1 - static_cast<uint32_t>(lane_id())) % kNgramMaxMatch);
  return {record.stream, record.scope, record.group, __shfl_sync(kFullMask, tail, from),
          static_cast<int>(length < kNgramMaxMatch ? length : kNgramMaxMatch)};
}

// The places of each order's n-gram: longest n first, then scope by scope, newest first. A warp a scope, eight lanes an
// order, a lane an entry. Called by all.
__device__ __forceinline__ void find_places(const NgramDraftParams& p, const Request& request, Row& s) {
  const NgramView& v = p.index;
  const int lane = lane_id(), order = lane / kOctet, way = lane % kOctet, rank = warp_id();
  NgramSlot slot;
  slot.scope = request.scope, slot.group = request.group;
  uint32_t scopes[kNgramScopes];
  const int num_scopes = request.context_len > 0 ? ngram_find_scopes(slot, p.weights, scopes) : 0;
  const uint32_t scope = rank == 0 ? scopes[0] : rank == 1 ? scopes[1] : scopes[2];
  uint32_t position[kNgramRecent];
  int own = 0;
  if (rank < num_scopes) {
    uint64_t hash = ngram_hash_seed(scope), hash_here = 0;
#pragma unroll
    for (int n = 1; n <= kNgramLongest; ++n) {
      hash = ngram_hash_step(hash, __shfl_sync(kFullMask, request.context, n - 1));
      if (n == 1 << order) hash_here = hash;
    }
    const uint64_t key = ngram_key(hash_here, order);
    const NgramSet& set = v.sets[ngram_set_of(v, key)];
    const uint32_t meta = set.meta[way];
    position[0] = set.newest[way];
    const auto* older = reinterpret_cast<const uint2*>(set.older[way]);
#pragma unroll
    for (int j = 0; j < kNgramOlder / 2; ++j) {
      const uint2 two = older[j];
      position[1 + 2 * j] = two.x;
      position[2 + 2 * j] = two.y;
    }
    const bool hit = request.context_len >= 1 << order && (meta ^ ngram_tag(key)) < 256;
    const uint32_t hits = __ballot_sync(kFullMask, hit) >> (order * kOctet) & 0xff;
    if (hit && way == first_bit(hits)) own = min(static_cast<int>(meta & 0xff), kNgramRecent);
#pragma unroll
    for (int j = 0; j < kNgramRecent; ++j)
      if (j < own) prefetch_block(v, position[j] >> kNgramOffsetBits);
    const uint32_t held = __reduce_add_sync(kFullMask, static_cast<uint32_t>(own) << (8 * order));
    if (lane == 0) s.held[rank] = held;
  }
  __syncthreads();
  int at = 0, found = 0;
#pragma unroll
  for (int i = 0; i < kNgramScopes; ++i) {
    const uint32_t held = i < num_scopes ? s.held[i] : 0;
#pragma unroll
    for (int o = 0; o < kNgramOrders; ++o) {
      const int count = static_cast<int>(held >> (8 * o) & 0xff);
      at += o > order || (o == order && i < rank) ? count : 0;
      found += count;
    }
  }
#pragma unroll
  for (int j = 0; j < kNgramRecent; ++j)
    if (j < own) s.found.place[at + j] = {position[j], scope, order, j};
  if (threadIdx.x == 0) s.places = found;
}

// The tokens before offset `offset` of a block that agree with the context, by a warp: lane m compares the token m
// before it with `wanted`, where `begin` were compared in blocks before. Returns how many agree from the first on.
__device__ __forceinline__ int compare_block(const BlockWords& block, int offset, int begin, int32_t wanted,
                                             int context_len) {
  const int lane = lane_id(), at = offset - 1 - (lane - begin);
  const int32_t token = block.token(at & (kWarp - 1));
  const bool same = lane >= begin && at >= 0 && lane < context_len && token == wanted;
  const uint32_t differ = ~(__ballot_sync(kFullMask, same) | ((1u << begin) - 1));
  return differ == 0 ? kWarp : first_bit(differ);
}

// What each place is worth to the stream, a warp a place; nothing if a longer n has named it.
__device__ __forceinline__ void verify_places(const NgramDraftParams& p, const Request& request, Row& s) {
  const NgramView& v = p.index;
#pragma unroll 1
  for (int i = warp_id(); i < s.places; i += kWarps) {
    const NgramPlace place = s.found.place[i];
    bool named = false;
    for (int j = lane_id(); j < i; j += kWarp) named |= s.found.place[j].position == place.position;
    if (__any_sync(kFullMask, named)) {
      if (lane_id() == 0) s.found.weight[i] = 0;
      continue;
    }
    int offset = static_cast<int>(place.position & ((1u << kNgramOffsetBits) - 1)), match = 0;
    BlockWords block = load_block(v, place.position >> kNgramOffsetBits);
    const uint32_t owner = block.head(1);
    if (offset >= kNgramBlockTokens || block.head(2) != place.scope) block.held = false;
    const uint32_t next = block.head(kNext);
    if (lane_id() == 0 && offset + p.out.nodes > kNgramBlockTokens) prefetch_block(v, next);
#pragma unroll 1
    for (int begin = 0; block.held;) {
      match = compare_block(block, offset, begin, request.context, request.context_len);
      begin += offset;
      if (match < begin || match >= request.context_len) break;
      block = follow(v, block, kPrev, kNext);
      offset = kNgramBlockTokens;
    }
    if (lane_id() == 0) {
      s.found.match[i] = match;
      s.found.weight[i] =
          match >= 1 << place.order && match >= p.min_match
              ? ngram_weight(p.weights.of(owner, place.scope, request.stream), p.weights.recency[place.age], match)
              : 0;
    }
  }
}

// The places that are worth something, while there is room. By a warp.
__device__ __forceinline__ void find_candidates(Row& s) {
  const int lane = lane_id();
  int count = 0;
  for (int begin = 0; begin < s.places && count < kNgramCandidates; begin += kWarp) {
    const int i = begin + lane;
    const uint64_t weight = i < s.places ? s.found.weight[i] : 0;
    const uint32_t good = __ballot_sync(kFullMask, weight > 0);
    const int at = count + __popc(good & ((1u << lane) - 1));
    if (weight > 0 && at < kNgramCandidates) s.candidate[at] = {s.found.place[i].position, s.found.match[i], weight};
    count += __popc(good);
  }
  __syncwarp();
  if (count > kNgramCandidates) count = kNgramCandidates;
  const Candidate own = lane < count ? s.candidate[lane] : Candidate{0, 0, 0};
  const int longest = static_cast<int>(__reduce_max_sync(kFullMask, static_cast<unsigned>(own.match)));
  // Weights are below 2^45.
  const uint32_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(own.weight) & 0xffffff);
  const uint32_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(own.weight >> 24));
  if (lane == 0) {
    s.candidates = count;
    s.longest = longest;
    if (count > 0) s.log2_total = ngram_log2(low + (uint64_t{high} << 24));
  }
}

// Copies what follows each candidate, as deep as a tree can be. By all warps.
template <int kWords>
__device__ __forceinline__ void copy_continuations(const NgramDraftParams& p, Row& s, Continuations<kWords>& c) {
  const NgramView& v = p.index;
  const int lane = lane_id(), depths = static_cast<int>(p.out.nodes) - 1;
  for (int i = warp_id(); i < s.candidates; i += kWarps) {
    const uint32_t position = s.candidate[i].position;
    auto offset = static_cast<int>(position & ((1u << kNgramOffsetBits) - 1));
    BlockWords block = load_block(v, position >> kNgramOffsetBits);
    int depth = 0;
    while (block.held) {
      const int32_t there = block.token(offset + lane), token = lane < kNgramBlockTokens - offset ? there : -1;
      const int written =
          first_bit(~__ballot_sync(kFullMask, token >= 0));  // a block has fewer tokens than a warp lanes
      if (lane < written && depth + lane < depths) c.tokens[depth + lane][i] = token;
      depth += written;
      if (depth >= depths || written < kNgramBlockTokens - offset) break;
      offset = 0;
      block = follow(v, block, kNext, kPrev);
    }
    if (lane == 0) s.length[i] = depth < depths ? depth : depths;
  }
}

// How long the texts of any two candidates agree, by all warps: a lane for one of them.
template <int kWords>
__device__ __forceinline__ void compare_texts(Row& s, Continuations<kWords>& c) {
  constexpr int kTogether = kNgramCandidates / kWarps;
  const int lane = lane_id(), length = lane < s.candidates ? s.length[lane] : 0;
  int agree[kTogether], most[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int other = warp_id() + k * kWarps;
    agree[k] = 0;
    most[k] = lane < other && other < s.candidates ? min(length, s.length[other]) : 0;
  }
  bool any = true;
  for (int d = 0; any; d += kAhead) {
    int32_t tokens[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) tokens[q] = c.tokens[d + q][lane];
    any = false;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      bool same = agree[k] == d;
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        same &= (c.tokens[d + q][warp_id() + k * kWarps] == tokens[q]) & (d + q < most[k]);
        agree[k] += same;
      }
      any |= same;
    }
    any = __any_sync(kFullMask, any);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int other = warp_id() + k * kWarps;
    if (lane < other) c.shared[other][lane] = c.shared[lane][other] = agree[k];
    if (lane == other) c.shared[lane][lane] = length;
  }
}

// The segments of the tree that all candidates make, in any order. By a warp, a lane a candidate, which opens those it
// is the first of.
template <int kWords>
__device__ __forceinline__ void find_segments(Row& s, Continuations<kWords>& c) {
  const int lane = lane_id(), length = lane < s.candidates ? s.length[lane] : 0;
  uint32_t above = 0;
  for (int start = 0; start < length;) {
    uint32_t group = 0;
    int end = length;
#pragma unroll 8
    for (int other = 0; other < kNgramCandidates; ++other) {
      const int agree = c.shared[other][lane];
      const bool in = agree > start;
      group |= static_cast<uint32_t>(in) << other;
      end = min(end, in ? agree : end);
    }
    if (first_bit(group) == lane) s.segment[atomicAdd(&s.segments, 1)] = {group, above, start, end - start};
    above = group;
    start = end;
  }
}

// Of a chain's nodes each is the best child of the one before: the other segments lose theirs. By a warp.
__device__ __forceinline__ void keep_chain(Row& s) {
  const int lane = lane_id();
  uint32_t kept[2] = {}, above = 0;
  const auto rank_of = [&](int i) { return ngram_rank(s.log2_w[i] - (s.segment[i].start + 1) * s.step[i], s.tie[i]); };
  while (true) {
    uint32_t best = 0;
    for (int i = lane; i < s.segments; i += kWarp)
      if (s.segment[i].parent == above) best = max(best, rank_of(i));
    best = __reduce_max_sync(kFullMask, best);
    if (best == 0) break;
    uint32_t group = 0;
    for (int i = lane; i < s.segments; i += kWarp)
      if (s.segment[i].parent == above && rank_of(i) == best) {
        kept[i / kWarp] = 1;
        group = s.segment[i].group;
      }
    above = __reduce_max_sync(kFullMask, group);
  }
  for (int i = lane; i < s.segments; i += kWarp)
    if (!kept[i / kWarp]) s.segment[i].length = 0;
}

// How many nodes of a segment have at least this log2 p.
__device__ __forceinline__ int nodes_from(const Row& s, int i, int32_t least) {
  const int32_t room = s.log2_w[i] - least;
  const int depth = room < 0 ? 0 : static_cast<int>(__umulhi(static_cast<uint32_t>(room), s.per_step[i]));
  return min(max(depth - s.segment[i].start, 0), s.segment[i].length);
}

// Lists the best nodes, as many as the tree takes and those that equal the last, segment by segment. By a warp.
__device__ __forceinline__ int list_nodes(Row& s, int most) {
  const int lane = lane_id();
  const auto count_from = [&](int32_t least) {
    int nodes = 0;
    for (int i = lane; i < s.segments; i += kWarp) nodes += nodes_from(s, i, least);
    return static_cast<int>(__reduce_add_sync(kFullMask, static_cast<unsigned>(nodes)));
  };
  int32_t least = -kNgramRankBase;
  if (count_from(least) > most)
    for (int32_t step = kNgramRankBase; step > 0; step /= 2)
      if (count_from(least + step) >= most) least += step;
  int listed = 0;
  for (int begin = 0; begin < s.segments; begin += kWarp) {
    const int i = begin + lane, own = i < s.segments ? nodes_from(s, i, least) : 0;
    int up_to = own;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int below = __shfl_up_sync(kFullMask, up_to, step);
      up_to += lane >= step ? below : 0;
    }
    if (i < s.segments) {
      s.first[i] = listed + up_to - own;
      s.kept[i] = own;
    }
    listed += __shfl_sync(kFullMask, up_to, kWarp - 1);
  }
  return listed;
}

// The tree's nodes, by their numbers.
template <int kWords>
__device__ __forceinline__ void number_nodes(const NgramDraftParams& p, Row& s, const Continuations<kWords>& c) {
  const auto t = static_cast<int>(threadIdx.x), nodes = static_cast<int>(p.out.nodes);
  if (t < s.segments) {
    const Segment own = s.segment[t];
    uint64_t weight = 0;
    int match = 0, above = -1;
#pragma unroll 4
    for (int i = 0; i < kNgramCandidates; ++i) {
      const bool in = own.group >> i & 1;
      const Candidate& candidate = s.candidate[i];
      weight += in ? candidate.weight : 0;
      match = max(match, in ? candidate.match : 0);
    }
    for (int i = 0; i < s.segments; ++i) above = s.segment[i].group == own.parent ? i : above;
    const int32_t step = p.step[match];
    s.log2_w[t] = ngram_log2(weight);
    s.step[t] = step;
    s.per_step[t] = 0xffffffffu / static_cast<uint32_t>(step) + 1;
    s.tie[t] = ngram_tie(match, first_bit(own.group));
    s.above[t] = above;
  }
  __syncthreads();
  if (t < kWarp) {
    if (p.chain) keep_chain(s);
    __syncwarp();
    const int listed = list_nodes(s, nodes - 1);
    if (t == 0) s.count = listed;
  }
  __syncthreads();
  const int listed = s.count;
  int j = 0, depth = 0, number = nodes;
  int32_t log2_p = 0;
  if (t < listed) {
#pragma unroll 4
    for (int i = 0; i < s.segments; ++i) j = (t >= s.first[i]) & (t < s.first[i] + s.kept[i]) ? i : j;
    depth = s.segment[j].start + t - s.first[j] + 1;
    log2_p = s.log2_w[j] - depth * s.step[j];
    number = 1;
#pragma unroll 4
    for (int i = 0; i < s.segments; ++i) number += nodes_from(s, i, log2_p + (s.tie[i] > s.tie[j] ? 0 : 1));
    s.node.number[t] = number;
  }
  __syncthreads();
  if (number < nodes) {
    const int above = s.above[j];
    s.node.token[number] = c.tokens[depth - 1][first_bit(s.segment[j].group)];
    s.node.parent[number] = t > s.first[j] ? s.node.number[t - 1]
                            : above >= 0   ? s.node.number[s.first[above] + s.kept[above] - 1]
                                           : 0;
    s.node.log2_p[number] = log2_p - s.log2_total;
  }
  if (t == 0) s.count = min(listed + 1, nodes);
  __syncthreads();
}

template <int kWords>
__global__ void __launch_bounds__(kThreads) ngram_draft_kernel(NgramDraftParams p) {
  begin_kernel();
  __shared__ Row s;
  __shared__ union {
    Continuations<kWords> continuations;
    TreeNodes<kWords> nodes;  // later
  } u;
  const int64_t row = blockIdx.x;
  const auto i = static_cast<int32_t>(threadIdx.x);
  if (i == 0) s.places = s.candidates = s.longest = s.log2_total = s.segments = s.count = 0;
  const Request request = find_request(p, row);
  find_places(p, request, s);
  __syncthreads();
  verify_places(p, request, s);
  __syncthreads();
  if (i < kWarp) find_candidates(s);
  __syncthreads();
  copy_continuations(p, s, u.continuations);
  __syncthreads();
  if (s.candidates > 0) {
    compare_texts(s, u.continuations);
    __syncthreads();
    if (i < kWarp) find_segments(s, u.continuations);
    __syncthreads();
  }
  if (request.context_len > 0) number_nodes(p, s, u.continuations);

  TreeHead head;
  const int32_t root = __shfl_sync(kFullMask, request.context, 0);
  if (request.context_len > 0) head = {.count = s.count, .root_token = root, .seq_len = p.seq_lens[row]};
  int32_t token = head.root_token, parent = -1;
  float score = i == 0 && head.count > 0 ? 0 : -INFINITY;
  if (i > 0 && i < head.count) {
    token = s.node.token[i];
    parent = s.node.parent[i];
    // They fall, so one that is too small is followed by such alone.
    if (s.node.log2_p[i] >= p.min_log2_p) score = ngram_score(s.node.log2_p[i]);
  }
  head.count = __syncthreads_count(score > -INFINITY);
  clear_nodes(u.nodes);
  __syncthreads();
  if (i < p.out.nodes) p.out_scores[row * p.out.nodes + i] = score;
  if (i >= head.count) parent = -1;
  write_nodes(p.out, row, head, token, parent, u.nodes);
  if (i == 0) {
    p.out_match_len[row] = s.longest;
    if (head.count > 0) {
      auto count = [](uint64_t& counter, int by) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(by));
      };
      count(p.index.header->drafts, 1);
      count(p.index.header->matches, s.longest > 0);
      count(p.index.header->drafted, head.count - 1);
    }
  }
}

}  // namespace

void ngram_draft_cuda(const NgramDraftParams& p, Stream stream) {
  const LaunchShape shape{.grid = grid_x("ngram_draft", p.batch), .threads = kThreads};
  if (p.out.words == 1)
    launch("ngram_draft", ngram_draft_kernel<1>, shape, stream, p);
  else
    launch("ngram_draft", ngram_draft_kernel<kMaxTreeNodes / 64>, shape, stream, p);
}

}  // namespace specdec
