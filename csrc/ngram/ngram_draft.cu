// One block a row; every step is as wide as it can be, since what takes time is steps that wait for one another.
//
// A warp finds the places of a scope: slot number, slot record and sets are three loads in a row, and sets are read
// whole (256 bytes), so that finding an entry and reading its positions is one of them. Then a warp takes a place, the
// 32 words of its block at once, and compares all 32 tokens in one step; then a warp takes a candidate and copies what
// follows, so that nothing is read from memory while the tree grows.
//
// Nor does the tree grow node by node: best first is the order of (weight, match, first candidate), and along a path
// where nobody leaves, all three stay. So nodes come in segments, at most 63 for 32 candidates, which are ranked by
// counting; a node's number is what better segments hold. A segment ends where one of its candidates parts from
// another, so what is needed of the texts is how long any two agree.
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
  int32_t places, candidates, longest, segments, count;
  uint64_t total;
  uint32_t held[kNgramScopes];  // byte o: how many places order o has in this scope
  NgramPlace place[kMostPlaces];
  int32_t match[kMostPlaces];
  uint64_t weight[kMostPlaces];
  Candidate candidate[kNgramCandidates];
  int32_t length[kNgramCandidates];  // tokens that follow
  Segment segment[kMostSegments];
  uint64_t segment_weight[kMostSegments], rank[kMostSegments];
  int32_t first[kMostSegments], above[kMostSegments];  // number of the first node; the segment it hangs off, -1
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
    if (j < own) s.place[at + j] = {position[j], scope, order, j};
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

// What each place is worth to the stream, a warp a place.
__device__ __forceinline__ void verify_places(const NgramDraftParams& p, const Request& request, Row& s) {
  const NgramView& v = p.index;
#pragma unroll 1
  for (int i = warp_id(); i < s.places; i += kWarps) {
    const NgramPlace place = s.place[i];
    int offset = static_cast<int>(place.position & ((1u << kNgramOffsetBits) - 1)), match = 0;
    BlockWords block = load_block(v, place.position >> kNgramOffsetBits);
    const uint32_t owner = block.head(1);
    if (offset >= kNgramBlockTokens || block.head(2) != place.scope) block.held = false;
    if (offset + p.out.nodes > kNgramBlockTokens) prefetch_block(v, block.head(kNext));
#pragma unroll 1
    for (int begin = 0; block.held;) {
      match = compare_block(block, offset, begin, request.context, request.context_len);
      begin += offset;
      if (match < begin || match >= request.context_len) break;
      block = follow(v, block, kPrev, kNext);
      offset = kNgramBlockTokens;
    }
    if (lane_id() == 0) {
      s.match[i] = match;
      s.weight[i] =
          match >= 1 << place.order && match >= p.min_match
              ? ngram_weight(p.weights.of(owner, place.scope, request.stream), p.weights.recency[place.age], match)
              : 0;
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
    uint32_t same = 0;  // a load behind a condition would wait for it: they are all made
#pragma unroll 8
    for (int j = 0; j < kWarp; ++j)
      same |= static_cast<uint32_t>(s.place[min(begin + j, kMostPlaces - 1)].position == own.position) << j;
    const bool is_new = own.weight > 0 && (same & good & ((1u << lane) - 1)) == 0;
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
#pragma unroll 4
    for (int c = 0; c < kNgramCandidates; ++c) {
      const bool in = group >> c & 1;
      const Candidate& candidate = s.candidate[c];
      weight += in ? candidate.weight : 0;
      match = max(match, in ? candidate.match : 0);
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
  if (i == 0) s.places = s.candidates = s.longest = s.segments = s.count = s.total = 0;
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
  if (request.context_len > 0) number_nodes(p, s);

  TreeHead head;
  const int32_t root = __shfl_sync(kFullMask, request.context, 0);
  if (request.context_len > 0) head = {.count = s.count, .root_token = root, .seq_len = p.seq_lens[row]};
  int32_t token = head.root_token, parent = -1;
  float score = i == 0 && head.count > 0 ? 0 : -INFINITY;
  if (i > 0 && i < head.count) {
    int j = 0;
#pragma unroll 4
    for (int k = 0; k < s.segments; ++k) {
      const int ahead = i - s.first[k], length = s.segment[k].length;
      j = (ahead >= 0) & (ahead < length) ? k : j;
    }
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
