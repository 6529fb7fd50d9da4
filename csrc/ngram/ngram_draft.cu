// One block a row; every step is as wide as it can be, since what takes time is steps that wait for one another.
//
// A warp finds the places: slot number, slot record and sets are three loads in a row, and sets are read whole (256
// bytes), so that finding an entry and reading its positions is one of them. Then a warp takes a place, the 32 words of
// its block at once, and compares all 32 tokens in one step; then a warp takes a candidate and copies what follows, so
// that nothing is read from memory while the tree grows.
//
// Nor does the tree grow node by node: best first is the order of (weight, match, first candidate), and along a path
// where nobody leaves, all three stay. So nodes come in segments, at most 63 for 32 candidates, which are ranked by
// counting; a node's number is what better segments hold. Groups of candidates that agree at a depth are found for all
// depths side by side.
//
// Floor: 4 loads that wait for one another, 5 or 6 where a match or a draft leaves its block, of 0.6 to 0.8 us from
// memory.
#include "core/slots.h"
#include "ngram/append.h"
#include "ngram/ngram_draft.h"
#include "tree/tree_nodes.cuh"

namespace specdec {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kOctet = kNgramWays;  // lanes for an order's set
constexpr int kMostPlaces = kNgramOrders * kNgramScopes * kNgramRecent;
constexpr int kMostSegments = 2 * kNgramCandidates - 1;  // edges of a trie of so many texts
constexpr int kHead = kWarp - kNgramBlockTokens;         // words of a block before its tokens
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
  if (index < v.num_blocks && lane_id() == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(v.blocks + index));
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
  NgramSlot slot;  // without its tail
  int32_t context_len;
  int32_t places, candidates, longest, segments, count;
  uint64_t total;
  int32_t context[kNgramMaxMatch];  // newest first
  NgramPlace place[kMostPlaces];
  int32_t match[kMostPlaces];
  uint64_t weight[kMostPlaces];
  Candidate candidate[kNgramCandidates];
  int32_t length[kNgramCandidates];  // tokens that follow
  Segment segment[kMostSegments];
  uint64_t segment_weight[kMostSegments], rank[kMostSegments];
  int32_t first[kMostSegments], above[kMostSegments];  // number of the first node; the segment it hangs off, -1
};

template <int kWords>
struct Continuations {
  static constexpr int kDepths = 64 * kWords;
  static constexpr int kTile = 64;  // depths grouped at a time
  int32_t tokens[kDepths][kNgramCandidates];
  uint32_t groups[kTile][kNgramCandidates];  // who has the same token at that depth
};

// The places of each order's n-gram: longest n first, then scope by scope, newest first. By a warp.
__device__ __forceinline__ void find_places(const NgramDraftParams& p, Row& s) {
  const NgramView& v = p.index;
  const int lane = lane_id(), order = lane / kOctet, way = lane % kOctet;
  uint32_t scopes[kNgramScopes];
  const int num_scopes = ngram_find_scopes(s.slot, p.weights, scopes);
  const bool looks = s.context_len >= 1 << order;

  uint32_t meta[kNgramScopes], position[kNgramScopes][kNgramRecent], tag[kNgramScopes];
#pragma unroll
  for (int i = 0; i < kNgramScopes; ++i) {
    meta[i] = tag[i] = 0;
    if (i >= num_scopes) continue;
    uint64_t keys[kNgramOrders];
    ngram_keys(scopes[i], [&](int n) { return s.context[n - 1]; }, keys);
    uint64_t key = keys[0];
#pragma unroll
    for (int o = 1; o < kNgramOrders; ++o) key = order == o ? keys[o] : key;
    const NgramSet& set = v.sets[ngram_set_of(v, key)];
    tag[i] = ngram_tag(key);
    meta[i] = set.meta[way];
    position[i][0] = set.newest[way];
    const auto* older = reinterpret_cast<const uint2*>(set.older[way]);
#pragma unroll
    for (int j = 0; j < kNgramOlder / 2; ++j) {
      const uint2 two = older[j];
      position[i][1 + 2 * j] = two.x;
      position[i][2 + 2 * j] = two.y;
    }
  }

  int held[kNgramScopes], found = 0;
#pragma unroll
  for (int i = 0; i < kNgramScopes; ++i) {
    const bool hit = looks && i < num_scopes && (meta[i] ^ tag[i]) < 256;
    const uint32_t hits = __ballot_sync(kFullMask, hit) >> (order * kOctet) & 0xff;
    const int count = static_cast<int>(meta[i] & 0xff);
    held[i] = hit && way == first_bit(hits) ? (count < kNgramRecent ? count : kNgramRecent) : 0;
  }
#pragma unroll
  for (int o = kNgramOrders - 1; o >= 0; --o)
#pragma unroll
    for (int i = 0; i < kNgramScopes; ++i) {
      if (i >= num_scopes) continue;
      const int of_both = __reduce_add_sync(kFullMask, order == o ? held[i] : 0);
      if (order == o)
#pragma unroll
        for (int j = 0; j < kNgramRecent; ++j)
          if (j < held[i]) s.place[found + j] = {position[i][j], scopes[i], order, j};
      found += of_both;
    }
  if (lane == 0) s.places = found;
}

// The tokens before a position that agree with the context, by a warp: lane m compares the m-th before it.
__device__ __forceinline__ int find_match(const NgramView& v, BlockWords block, int offset, int32_t wanted,
                                          int context_len) {
  const int lane = lane_id();
  int match = 0, begin = 0;  // what is before `begin` was compared
  while (true) {
    const int at = offset - 1 - (lane - begin);
    const int32_t token = block.token(at >= 0 ? at : 0);
    const bool same = lane >= begin && at >= 0 && lane < context_len && token == wanted;
    const uint32_t differ = ~(__ballot_sync(kFullMask, same) | ((1u << begin) - 1));
    match = differ == 0 ? kWarp : first_bit(differ);
    begin += offset;
    if (match < begin || match >= context_len) return match;
    block = follow(v, block, kPrev, kNext);
    if (!block.held) return match;
    offset = kNgramBlockTokens;
  }
}

// What each place is worth to the stream, by all warps.
__device__ __forceinline__ void verify_places(const NgramDraftParams& p, Row& s) {
  constexpr int kTogether = 4;
  const NgramView& v = p.index;
  const int32_t wanted = s.context[lane_id()];
  for (int begin = warp_id(); begin < s.places; begin += kWarps * kTogether) {
    BlockWords blocks[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int i = begin + k * kWarps;
      blocks[k] = {0, false};
      if (i < s.places) blocks[k] = load_block(v, s.place[i].position >> kNgramOffsetBits);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int i = begin + k * kWarps;
      if (i >= s.places) break;
      const NgramPlace place = s.place[i];
      const auto offset = static_cast<int>(place.position & ((1u << kNgramOffsetBits) - 1));
      const BlockWords& block = blocks[k];
      int match = 0;
      uint64_t weight = 0;
      if (block.held && offset < kNgramBlockTokens && block.head(2) == place.scope) {
        if (offset + p.out.nodes > kNgramBlockTokens) prefetch_block(v, block.head(kNext));
        match = find_match(v, block, offset, wanted, s.context_len);
        if (match >= 1 << place.order && match >= p.min_match)
          weight = ngram_weight(p.weights.of(block.head(1), place.scope, s.slot.stream), p.weights.recency[place.age],
                                match);
      }
      if (lane_id() == 0) {
        s.match[i] = match;
        s.weight[i] = weight;
      }
    }
  }
}

// Every place once, with the longest n that names it, while there is room. By a warp.
__device__ __forceinline__ void find_candidates(Row& s) {
  const int lane = lane_id();
  int count = 0;
  for (int begin = 0; begin < s.places && count < kNgramCandidates; begin += kWarp) {
    Candidate own{0, 0, 0};
    if (begin + lane < s.places) own = {s.place[begin + lane].position, s.match[begin + lane], s.weight[begin + lane]};
    for (int i = 0; i < count; ++i)
      if (s.candidate[i].position == own.position) own.weight = 0;
    const uint32_t good = __ballot_sync(kFullMask, own.weight > 0);
    bool is_new = false;
    if (own.weight > 0) is_new = first_bit(__match_any_sync(good, own.position)) == lane;
    const uint32_t news = __ballot_sync(kFullMask, is_new);
    const int at = count + __popc(news & ((1u << lane) - 1));
    if (is_new && at < kNgramCandidates) s.candidate[at] = own;
    count += __popc(news);
    __syncwarp();
  }
  if (count > kNgramCandidates) count = kNgramCandidates;
  const Candidate own = lane < count ? s.candidate[lane] : Candidate{0, 0, 0};
  const int longest = static_cast<int>(__reduce_max_sync(kFullMask, static_cast<unsigned>(own.match)));
  // Weights are below 2^45.
  const uint32_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(own.weight) & 0xffffff);
  const uint32_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(own.weight >> 24));
  if (lane == 0) {
    s.candidates = count;
    s.longest = longest;
    s.total = low + (uint64_t{high} << 24);
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

// The segments of the tree that all candidates make, in any order.
template <int kWords>
__device__ __forceinline__ void find_segments(const NgramDraftParams& p, Row& s, Continuations<kWords>& c) {
  const int lane = lane_id(), depths = static_cast<int>(p.out.nodes) - 1;
  const bool walks = static_cast<int>(threadIdx.x) < s.candidates;  // a thread a candidate
  uint32_t group = static_cast<uint32_t>((uint64_t{1} << s.candidates) - 1);
  int open = -1;  // the segment that this candidate is the first of
  bool ended = !walks;
  for (int begin = 0; begin < depths; begin += c.kTile) {
    const int end = begin + c.kTile < depths ? begin + c.kTile : depths;
    for (int d = begin + warp_id(); d < end; d += kWarps) {
      const bool goes_on = lane < s.candidates && d < s.length[lane];
      const uint32_t all = __ballot_sync(kFullMask, goes_on);
      if (goes_on) c.groups[d - begin][lane] = __match_any_sync(all, c.tokens[d][lane]);
      __syncwarp();
    }
    __syncthreads();
    for (int d = begin; d < end && !ended; ++d) {
      const uint32_t here = d < s.length[lane] ? c.groups[d - begin][lane] & group : 0;
      if (here != group || d == 0) {
        if (open >= 0) s.segment[open].length = d - s.segment[open].start;
        open = -1;
        if (here != 0 && first_bit(here) == lane) {
          open = atomicAdd(&s.segments, 1);
          s.segment[open] = {here, d == 0 ? 0 : group, d, 0};
        }
        group = here;
      }
      ended = (group & (group - 1)) == 0;  // by itself from here on
    }
    if (__syncthreads_and(ended)) break;
  }
  if (open >= 0) s.segment[open].length = (ended ? s.length[lane] : depths) - s.segment[open].start;
}

// Of a chain's nodes each is the best child of the one before: the other segments lose theirs. By a warp.
__device__ __forceinline__ void keep_chain(Row& s) {
  const int lane = lane_id();
  uint32_t kept[2] = {}, above = 0;
  while (true) {
    uint64_t best = 0;
    for (int i = lane; i < s.segments; i += kWarp)
      if (s.segment[i].parent == above && s.rank[i] > best) best = s.rank[i];
    const uint32_t high = __reduce_max_sync(kFullMask, static_cast<uint32_t>(best >> 32));
    const uint32_t low =
        __reduce_max_sync(kFullMask, static_cast<uint32_t>(best >> 32) == high ? static_cast<uint32_t>(best) : 0);
    if ((high | low) == 0) break;
    uint32_t group = 0;
    for (int i = lane; i < s.segments; i += kWarp)
      if (s.rank[i] == (uint64_t{high} << 32 | low)) {
        kept[i / kWarp] = 1;
        group = s.segment[i].group;
      }
    above = __reduce_max_sync(kFullMask, group);
  }
  for (int i = lane; i < s.segments; i += kWarp)
    if (!kept[i / kWarp]) s.segment[i].length = 0;
}

// Where the segments' nodes stand in the tree.
__device__ __forceinline__ void number_nodes(const NgramDraftParams& p, Row& s) {
  const auto i = static_cast<int>(threadIdx.x);
  const bool mine = i < s.segments;
  if (mine) {
    const uint32_t group = s.segment[i].group;
    uint64_t weight = 0;
    int match = 0;
#pragma unroll 8
    for (int c = 0; c < kNgramCandidates; ++c)
      if (group >> c & 1) {
        weight += s.candidate[c].weight;
        match = max(match, s.candidate[c].match);
      }
    s.segment_weight[i] = weight;
    s.rank[i] = ngram_rank(weight, match, first_bit(group));
  }
  __syncthreads();
  if (p.chain) {
    if (i < kWarp) keep_chain(s);
    __syncthreads();
  }
  int first = 1, above = -1, all = 1;
  if (mine) {
    const uint64_t rank = s.rank[i];
    const uint32_t parent = s.segment[i].parent;
#pragma unroll 4
    for (int j = 0; j < s.segments; ++j) {
      const int length = s.segment[j].length;
      first += s.rank[j] > rank ? length : 0;
      all += length;
      above = s.segment[j].group == parent ? j : above;
    }
    s.first[i] = first;
    s.above[i] = above;
  }
  if (i == 0) s.count = all < p.out.nodes ? all : static_cast<int>(p.out.nodes);
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
  if (i < kWarp) {
    const int64_t number = slot_of(p.slots, row, p.index.num_slots);
    const NgramSlot* record = number < 0 ? nullptr : p.index.slots + number;
    uint32_t length = 0;
    if (record) {
      const int32_t tail = record->tail[i];
      length = record->live ? record->length : 0;
      s.context[i] = __shfl_sync(kFullMask, tail, static_cast<int>((length - 1 - i) % kNgramMaxMatch));
    }
    if (i == 0) {
      s.places = s.candidates = s.longest = s.segments = s.count = s.total = 0;
      s.context_len = length < kNgramMaxMatch ? static_cast<int>(length) : kNgramMaxMatch;
      if (length > 0) {
        s.slot.stream = record->stream;
        s.slot.scope = record->scope;
        s.slot.group = record->group;
      }
    }
    __syncwarp();
    if (length > 0) find_places(p, s);
  }
  __syncthreads();
  verify_places(p, s);
  __syncthreads();
  if (i < kWarp) find_candidates(s);
  __syncthreads();
  copy_continuations(p, s, u.continuations);
  __syncthreads();
  if (s.candidates > 0) {
    find_segments(p, s, u.continuations);
    __syncthreads();
  }
  if (s.context_len > 0) number_nodes(p, s);

  TreeHead head;
  if (s.context_len > 0) head = {.count = s.count, .root_token = s.context[0], .seq_len = p.seq_lens[row]};
  int32_t token = head.root_token, parent = -1;
  float score = i == 0 && head.count > 0 ? 0 : -INFINITY;
  if (i > 0 && i < head.count) {
    int j = 0;
    while (j < s.segments - 1 && (i < s.first[j] || i >= s.first[j] + s.segment[j].length)) ++j;
    const Segment own = s.segment[j];
    const int ahead = i - s.first[j], above = s.above[j];
    token = u.continuations.tokens[own.start + ahead][first_bit(own.group)];
    parent = ahead > 0 ? i - 1 : above < 0 ? 0 : s.first[above] + s.segment[above].length - 1;
    // Weights fall, so a probability that is too small is followed by such alone.
    const double probability = ngram_probability(s.segment_weight[j], s.total);
    if (probability >= p.min_prob) score = ngram_score(probability);
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
