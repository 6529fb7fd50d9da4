// One block a row; every step is as wide as it can be, since what takes time is steps that wait for one another, and
// instructions that are executed once each.
//
// A warp takes an n-gram of a scope: slot number, slot record and set are three loads in a row, and a set is read whole
// (512 bytes), so that finding an entry and reading its positions is one of them. Then eight lanes take a place: its
// block is one load of 16 bytes a lane, which 64 places do at the same time, and so are the blocks beside it, which are
// most often those before and behind it in its text. That tells the match, and what follows, so nothing is read from
// memory while the tree grows.
//
// Nor does the tree grow node by node. Along a path where no candidate leaves, log2 p falls by the same step from node
// to node: such a segment, of which 32 candidates have at most 63, holds as many nodes above a bound as a division
// says. So the bound that leaves enough nodes is found by bisection, and a node's number by counting what is better. A
// segment ends where one of its candidates parts from another, so what is needed of the texts is how long any two
// agree; it is that candidate's which is the first of those on it.
//
// Floor: 3 loads that wait for one another, one or two more where the blocks of a text lie apart or a draft is longer
// than a block, of 0.6 to 0.8 us from memory.
#include "core/slots.h"
#include "core/warp_scan.cuh"
#include "ngram/append.h"
#include "ngram/ngram_draft.h"
#include "tree/tree_nodes.cuh"

namespace specdec {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kOctet = 8;                                   // lanes that hold a block, 16 bytes each
constexpr int kTogether = kThreads / kOctet;                // places verified at a time
constexpr int kMostPlaces = 3 * kTogether;                  // that may be verified
constexpr int kNgrams = kNgramOrders * kNgramScopes;        // that are looked up
constexpr int kMostSegments = 2 * kNgramCandidates - 1;     // edges of a trie of so many texts
constexpr int kMostListed = kMaxTreeNodes + kMostSegments;  // nodes at or above a bound: each segment has one at it
constexpr int kHead = kWarp - kNgramBlockTokens;            // words of a block before its tokens
constexpr uint32_t kNoBlock = 0xffffffff;                   // as an index
static_assert(kNgrams < kWarps && kNgramPlaces <= kMostPlaces && kNgramCandidates == kWarp && kNgramMaxMatch == kWarp);
static_assert(sizeof(NgramSet) == kWarp * sizeof(uint4) && sizeof(NgramBlock) == kOctet * sizeof(uint4));
static_assert(kThreads >= kMostListed && kMaxTreeNodes <= 256);  // numbers and depths are bytes

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ __forceinline__ int first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

struct alignas(16) Candidate {
  uint64_t weight;
  int32_t match;
  int32_t length;  // tokens that follow
};

// Of a warp's weights, which are below 2^45.
__device__ __forceinline__ uint64_t sum_weights(uint64_t weight) {
  const uint32_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(weight) & 0xffffff);
  return low + (uint64_t{__reduce_add_sync(kFullMask, static_cast<uint32_t>(weight >> 24))} << 24);
}

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
  int32_t context[kNgramMaxMatch];
  int32_t longest, log2_total, segments;
  Candidate candidate[kNgramCandidates];
  uint32_t position[kNgramCandidates];
  // What follows each; four words more let lanes that read different ones do so at once.
  alignas(16) int32_t text[kNgramCandidates][64 * kWords + 4];
  uint8_t shared[kNgramCandidates][kNgramCandidates];  // how many tokens of it two of them share; one with itself: all
  uint32_t leaves[kNgramCandidates];  // the name of the node behind which it is the first of its path's candidates
  Segment segment[kMostSegments];
  alignas(16) uint32_t listed_rank[kMostListed + 4];
  uint16_t listed_name[kMostListed];
  uint16_t listed[kMaxTreeNodes];  // where the node of that number is
  union {
    Places places;                                  // first
    uint8_t number[kNgramCandidates][64 * kWords];  // of the node of that name
    TreeNodes<kWords> nodes;                        // last
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

// The places of the n-grams that end the context, a warp each, and that which is followed. Returns how many rounds it
// takes to verify as many as there may be.
template <class Row>
__device__ __forceinline__ int find_places(const NgramDraftParams& p, const Request& request, Row& s) {
  const NgramView& v = p.index;
  const int lane = lane_id(), order = kNgramOrders - 1 - warp_id() % kNgramOrders, rank = warp_id() / kNgramOrders;
  NgramSlot slot;
  slot.scope = request.scope, slot.group = request.group;
  uint32_t scopes[kNgramScopes] = {};
  const int num_scopes = request.context_len > 0 ? ngram_find_scopes(slot, p.weights, scopes) : 0;
  if (warp_id() == kNgrams) {
    const int rest = 1 + num_scopes * kNgramOrders * kNgramRecent;
    if (rest + lane < num_scopes * kTogether) s.places.position[rest + lane] = kNgramNone;
    const int last = ngram_followed(request.followed, request.length);
    const NgramFollowed followed{last == 0 ? request.followed[0].position : request.followed[1].position,
                                 last == 0 ? request.followed[0].length : request.followed[1].length};
    const uint32_t place = num_scopes > 0 ? ngram_follow(v, followed, request.length) : kNgramNone;
    if (lane == 0) s.places.position[0] = place;
  }
  if (rank >= num_scopes) return num_scopes;
  const uint32_t scope = rank == 0 ? scopes[0] : rank == 1 ? scopes[1] : scopes[2];
  uint64_t hash = ngram_hash_seed(scope);
#pragma unroll
  for (int n = 0; n < kNgramLongest; ++n) {
    const uint64_t longer = ngram_hash_step(hash, __shfl_sync(kFullMask, request.context, n));
    hash = n < 1 << order ? longer : hash;
  }
  const uint64_t key = ngram_key(hash, order);
  const int i = warp_id() % kNgramOrders * num_scopes + rank;
  s.places.set[i][lane] = reinterpret_cast<const uint4*>(v.sets + ngram_set_of(v, key))[lane];
  __syncwarp();
  const auto& set = reinterpret_cast<const NgramSet&>(s.places.set[i]);
  const uint32_t meta = set.meta[lane % kNgramWays];
  const uint32_t hits = __ballot_sync(kFullMask, (meta ^ ngram_tag(key)) < 256);
  const int way = hits == 0 ? 0 : first_bit(hits);
  const auto count = static_cast<int>(__shfl_sync(kFullMask, meta, way) & 0xff);
  const int held = hits != 0 && request.context_len >= 1 << order ? min(count, kNgramRecent) : 0;
  if (lane < kNgramRecent) {
    const uint32_t position = lane == 0 ? set.newest[way] : set.older[way][max(lane, 1) - 1];
    s.places.position[1 + i * kNgramRecent + lane] = lane < held ? position : kNgramNone;  // which is no position
  }
  if (lane == 0) {
    s.places.scope[i] = scope;
    s.places.least[i] = 1 << order;
  }
  return num_scopes;
}

// A block of the store in the registers of eight lanes, four words each.
struct BlockWords {
  uint4 words;

  __device__ void load(const NgramView& v, uint32_t index) {
    words = {};  // which is no block with a link to it
    if (index < v.num_blocks) words = reinterpret_cast<const uint4*>(v.blocks + index)[lane_id() % kOctet];
  }
  __device__ uint32_t id() const { return __shfl_sync(kFullMask, words.x, 0, kOctet); }
  __device__ uint32_t owner() const { return __shfl_sync(kFullMask, words.y, 0, kOctet); }
  __device__ uint32_t scope() const { return __shfl_sync(kFullMask, words.z, 0, kOctet); }
  __device__ uint32_t prev() const { return __shfl_sync(kFullMask, words.w, 0, kOctet); }
  __device__ uint32_t next() const { return __shfl_sync(kFullMask, words.x, 1, kOctet); }

  // For which of its tokens `is(word, token)` holds: bit `word`, for all lanes.
  template <class Is>
  __device__ uint32_t which(const Is& is) const {
    const int first = lane_id() % kOctet * 4;
    uint32_t bits = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) bits |= static_cast<uint32_t>(first + c >= kHead && is(first + c, token(c))) << c;
    bits <<= first;
#pragma unroll
    for (int step = 1; step < kOctet; step *= 2) bits |= __shfl_xor_sync(kFullMask, bits, step);
    return bits;
  }
  __device__ int32_t token(int c) const {
    return static_cast<int32_t>(c == 0 ? words.x : c == 1 ? words.y : c == 2 ? words.z : words.w);
  }
};

// What eight lanes know of a place. All lanes of a warp go through all of it, as its warp's votes need them.
struct Place {
  BlockWords own, before, after;  // its block, and those beside it
  uint32_t index;
  int offset;
  bool held;

  __device__ void load(const NgramView& v, uint32_t position, int depths) {
    index = position >> kNgramOffsetBits & ((1u << v.block_bits) - 1);
    offset = static_cast<int>(position & ((1u << kNgramOffsetBits) - 1));
    held = offset < kNgramBlockTokens;
    own.words = before.words = after.words = {};
    if (!held) return;
    own.load(v, index);
    before.load(v, index - 1);
    if (offset + depths > kNgramBlockTokens) after.load(v, index + 1);
    const int further = 2 + lane_id() % kOctet;
    if (offset + depths > further * kNgramBlockTokens && index + further < v.num_blocks)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(v.blocks + index + further));
  }

  // How many of its block's tokens before word `end` agree with the context from its m-th token on.
  template <class Row>
  __device__ static int agree(const BlockWords& block, int end, int m, const Row& s, int context_len) {
    const uint32_t same = block.which([&](int word, int32_t token) {
      const int at = m + end - 1 - word;
      return word < end && at < context_len && token == s.context[at % kNgramMaxMatch];
    });
    return __clz(static_cast<int>(~(same << (kWarp - end))));
  }

  template <class Row>
  __device__ int match(const NgramView& v, const Row& s, int context_len) const {
    int found = agree(own, held ? kHead + offset : kHead, 0, s, context_len);
    bool more = held && found == offset && found < context_len;
    BlockWords block = own, other = before;
    uint32_t likely = index - 1;
#pragma unroll 1
    while (__any_sync(kFullMask, more)) {
      const uint32_t id = block.id(), link = block.prev(), at = link & ((1u << v.block_bits) - 1);
      if (more && at != likely) other.load(v, at);
      const bool linked = (other.id() == link) & (other.next() == id);
      more = more && linked;
      const int run = agree(other, kWarp, found, s, context_len);
      if (more) found += run;
      more = more && run == kNgramBlockTokens && found < context_len;
      block = other;
      likely = kNoBlock;
    }
    return found;
  }

  // Copies what follows, and returns how much it is.
  __device__ int copy(const NgramView& v, bool wanted, int depths, int32_t* text) const {
    int depth = 0, from = wanted ? offset : 0;
    bool more = wanted;
    BlockWords block = own, other = after;
    uint32_t likely = index + 1;
#pragma unroll 1
    while (__any_sync(kFullMask, more)) {
      const uint32_t written = block.which([](int, int32_t token) { return token >= 0; });
      const int run = more ? first_bit(~(written >> (kHead + from))) : 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int k = lane_id() % kOctet * 4 + c - kHead - from;
        if (k >= 0 && k < run && depth + k < depths) text[depth + k] = block.token(c);
      }
      depth += run;
      more = more && run == kNgramBlockTokens - from && depth < depths;
      from = 0;
      const uint32_t id = block.id(), link = block.next(), at = link & ((1u << v.block_bits) - 1);
      if (more && at != likely) other.load(v, at);
      const bool linked = (other.id() == link) & (other.prev() == id);
      more = more && linked;
      block = other;
      likely = kNoBlock;
    }
    return min(depth, depths);
  }
};

// Verifies the places, and keeps those that are worth something while there is room, with what follows them. Returns
// how many.
template <class Row>
__device__ __forceinline__ int find_candidates(const NgramDraftParams& p, const Request& request, int rounds, Row& s) {
  static_assert(kTogether == 2 * kWarp);
  const int lane = lane_id(), depths = static_cast<int>(p.out.nodes) - 1;
  int count = 0;
#pragma unroll 1
  for (int begin = 0; begin < rounds * kTogether && count < kNgramCandidates; begin += kTogether) {
    const int i = begin + static_cast<int>(threadIdx.x) / kOctet;
    const int ngram = max(i - 1, 0) / kNgramRecent, age = max(i - 1, 0) % kNgramRecent;
    const uint32_t position = s.places.position[i];
    Place place;
    place.load(p.index, position, depths);
    bool named = false;  // by a longer n
#pragma unroll 1
    for (int j = lane % kOctet * 4; j < i; j += 4 * kOctet) {
      const uint4 four = reinterpret_cast<const uint4&>(s.places.position[j]);
      named |= four.x == position || (j + 1 < i && four.y == position) || (j + 2 < i && four.z == position) ||
               (j + 3 < i && four.w == position);
    }
    named = (__ballot_sync(kFullMask, named) >> (lane / kOctet * kOctet) & 0xff) != 0;
    const uint32_t id = place.own.id(), owner = place.own.owner(), scope = place.own.scope();
    const bool seen = i == 0 ? ngram_sees(request.scope, request.group, scope) : scope == s.places.scope[ngram];
    const uint32_t written = place.own.which([](int, int32_t token) { return token >= 0; });
    place.held = place.held && !named && seen && id == position >> kNgramOffsetBits;
    place.held = place.held && (written >> (kHead + place.offset) % kWarp & 1) != 0;
    int match = 0;
    uint64_t weight = 0;
    if (__any_sync(kFullMask, place.held)) match = place.match(p.index, s, request.context_len);
    if (place.held && match >= (i == 0 ? 0 : s.places.least[ngram]) && match >= p.min_match)
      weight = ngram_weight(p.weights.of(owner, scope, request.stream), p.weights.recency[age], match);
    if (lane % kOctet == 0) s.places.good[i] = weight > 0;
    __syncthreads();

    const uint64_t low = __ballot_sync(kFullMask, s.places.good[begin + lane]);
    const uint64_t good = low | uint64_t{__ballot_sync(kFullMask, s.places.good[begin + kWarp + lane])} << kWarp;
    const int at = count + __popcll(good & low_bits(i - begin));
    const bool chosen = weight > 0 && at < kNgramCandidates;
    const int length = place.copy(p.index, chosen, depths, s.text[chosen ? at : 0]);
    if (chosen && lane % kOctet == 0) {
      s.candidate[at] = {weight, match, length};
      s.position[at] = position;
    }
    count = min(count + __popcll(good), kNgramCandidates);
  }
  __syncthreads();
  return count;
}

// How long the texts of any two candidates agree, a lane for two of them; and what is needed of all candidates.
template <class Row>
__device__ __forceinline__ void compare_texts(const Request& request, Row& s, int count) {
  const int lane = lane_id();
  // A warp has the pairs of its candidate with those behind it, and in its other lanes those of the one as far from the
  // end.
  if (const int first = warp_id(); 2 * first < count) {
    const bool mirrored = lane < first;
    const int i = mirrored ? count - 1 - first : first, j = mirrored ? count - 1 - lane : lane;
    const bool is_pair = i < j && j < count && (!mirrored || i != first);
    const int most = is_pair ? min(s.candidate[i].length, s.candidate[j].length) : 0;
    int agree = 0;
#pragma unroll 1
    for (bool more = most > 0; more;) {
      const int4 ours = reinterpret_cast<const int4&>(s.text[i][agree]);
      const int4 theirs = reinterpret_cast<const int4&>(s.text[j][agree]);
      const int same = ours.x != theirs.x   ? 0
                       : ours.y != theirs.y ? 1
                       : ours.z != theirs.z ? 2
                                            : 3 + (ours.w == theirs.w);
      agree += same;
      more = same == 4 && agree < most;
    }
    if (is_pair) s.shared[i][j] = s.shared[j][i] = static_cast<uint8_t>(min(agree, most));
  }
  if (warp_id() == kWarps - 1) {
    const Candidate own = lane < count ? s.candidate[lane] : Candidate{0, 0, 0};
    s.shared[lane][lane] = static_cast<uint8_t>(own.length);
    const auto longest = __reduce_max_sync(kFullMask, static_cast<unsigned>(own.match));
    const uint64_t total = sum_weights(own.weight);
    const int best = first_bit(__ballot_sync(kFullMask, lane < count && own.match == static_cast<int>(longest)));
    if (lane == 0) {  // that is what the next draft follows, in one store, as a row may have the same slot
      const int last = ngram_followed(request.followed, request.length);
      reinterpret_cast<uint2&>(request.slot->followed[1 - last]) = {s.position[best], request.length};
      s.longest = static_cast<int>(longest);
      s.log2_total = ngram_log2(total);
    }
  }
  __syncthreads();
}

// The segments of the tree that all candidates make, in any order: a warp for those that a candidate is the first of,
// from the last to the one that begins where the candidate parts from those before it.
template <class Row>
__device__ __forceinline__ void find_segments(const NgramDraftParams& p, Row& s, int count) {
  const int lane = lane_id();
  const Candidate candidate = lane < count ? s.candidate[lane] : Candidate{0, 0, 0};
  for (int i = warp_id(); i < count; i += kWarps) {
    const int end = lane < count ? s.shared[i][lane] : 0;
    const auto begin = static_cast<int>(__reduce_max_sync(kFullMask, static_cast<unsigned>(lane < i ? end : 0)));
    const uint32_t there = __ballot_sync(kFullMask, lane < i && end == begin);
    if (lane == 0) s.leaves[i] = begin > 0 ? name_of(static_cast<uint32_t>(first_bit(there)), begin) : 0;
    int ends = s.candidate[i].length;  // as it agrees with itself so long
#pragma unroll 1
    while (ends > begin) {
      const bool in = lane >= i && end >= ends;
      const uint64_t weight = sum_weights(in ? candidate.weight : 0);
      const auto match =
          static_cast<int>(__reduce_max_sync(kFullMask, static_cast<unsigned>(in ? candidate.match : 0)));
      const auto start =
          max(begin, static_cast<int>(__reduce_max_sync(kFullMask, static_cast<unsigned>(in ? 0 : end))));
      if (lane == 0) {
        const int32_t step = p.step[match];
        s.segment[atomicAdd(&s.segments, 1)] = {.log2_w = ngram_log2(weight),
                                                .step = step,
                                                .per_step = 0xffffffffu / static_cast<uint32_t>(step) + 1,
                                                .tie = ngram_tie(match, i),
                                                .start = start,
                                                .length = ends - start,
                                                .owner = static_cast<uint32_t>(i)};
      }
      ends = start;
    }
  }
  __syncthreads();
}

// The segments in the registers of a warp, two a lane.
struct Segments {
  Segment own[2];

  template <class Row>
  __device__ void load(const Row& s) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = lane_id() + k * kWarp;
      own[k] = i < s.segments ? s.segment[i] : Segment{};
    }
  }

  // Of a chain's nodes each is the best child of the one before: the other segments lose theirs.
  template <class Row>
  __device__ void keep_chain(const Row& s) {
    uint32_t rank[2], parent[2], at = 0;
    bool kept[2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t leaves = s.leaves[own[k].owner];
      const bool begins = own[k].start == static_cast<int>(leaves & 0xff);
      parent[k] = begins ? leaves : name_of(own[k].owner, own[k].start);
      rank[k] = own[k].length > 0 ? ngram_rank(own[k].log2_p(own[k].start + 1), own[k].tie) : 0;
    }
    while (true) {
      const uint32_t here = max(parent[0] == at ? rank[0] : 0, parent[1] == at ? rank[1] : 0);
      const uint32_t best = __reduce_max_sync(kFullMask, here);
      if (best == 0) break;
      uint32_t end = 0;
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (parent[k] == at && rank[k] == best) {
          kept[k] = true;
          end = name_of(own[k].owner, own[k].start + own[k].length);
        }
      at = __reduce_max_sync(kFullMask, end);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) own[k].length = kept[k] ? own[k].length : 0;
  }

  // The largest log2 p that as many nodes have at least. By all warps, which try fifteen at a time.
  __device__ int32_t bound(int most) const {
    int32_t best = -kNgramRankBase, least = best;
    const int all = own[0].length + own[1].length;
    if (__reduce_add_sync(kFullMask, all) <= most) return least;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (own[k].length > 0) best = max(best, own[k].log2_p(own[k].start + 1));
      if (own[k].length >= most) least = max(least, own[k].log2_p(own[k].start + most));
    }
    best = __reduce_max_sync(kFullMask, best);
    least = __reduce_max_sync(kFullMask, least);
    static_assert(kWarps == 16);
    const int bits = kWarp - __clz(best - least);
#pragma unroll 1
    for (int at = (bits + 3) / 4 * 4 - 4; at >= 0; at -= 4) {
      const int32_t tried = least + ((warp_id() + 1) << at);
      const int nodes = __reduce_add_sync(kFullMask, own[0].nodes_from(tried) + own[1].nodes_from(tried));
      least += __syncthreads_count(lane_id() == 0 && warp_id() < kWarps - 1 && nodes >= most) << at;
    }
    return least;
  }
};

// Names the tree's nodes by their numbers, and returns how many there are, with the root.
template <class Row>
__device__ __forceinline__ int number_nodes(const NgramDraftParams& p, Row& s) {
  const auto t = static_cast<int>(threadIdx.x), nodes = static_cast<int>(p.out.nodes);
  const int lane = lane_id();
  // Every warp finds which nodes there are, and lists those of some segments.
  Segments segments;
  segments.load(s);
  if (p.chain) segments.keep_chain(s);
  const int32_t least = max(segments.bound(nodes - 1), p.min_log2_p + s.log2_total);
  const int kept[2] = {segments.own[0].nodes_from(least), segments.own[1].nodes_from(least)};
  const uint32_t up_to = sum_up_to_lane(static_cast<uint32_t>(kept[0] | kept[1] << 16));
  const uint32_t all = __shfl_sync(kFullMask, up_to, kWarp - 1);
  const int listed = static_cast<int>((all & 0xffff) + (all >> 16));
  const int first[2] = {static_cast<int>(up_to & 0xffff) - kept[0],
                        static_cast<int>((all & 0xffff) + (up_to >> 16)) - kept[1]};
#pragma unroll 1
  for (int i = warp_id(); i < s.segments; i += kWarps) {
    const Segment& segment = s.segment[i];
    const int here = __shfl_sync(kFullMask, i < kWarp ? kept[0] : kept[1], i % kWarp);
    const int at = __shfl_sync(kFullMask, i < kWarp ? first[0] : first[1], i % kWarp);
    for (int q = lane; q < here; q += kWarp) {
      const int depth = segment.start + 1 + q;
      s.listed_rank[at + q] = ngram_rank(segment.log2_p(depth), segment.tie);
      s.listed_name[at + q] = static_cast<uint16_t>(name_of(segment.owner, depth));
    }
  }
  if (t < 4) s.listed_rank[listed + t] = 0;
  __syncthreads();

  if (t < listed) {
    const uint32_t rank = s.listed_rank[t], name = s.listed_name[t];
    int number = 1;
#pragma unroll 2
    for (int i = 0; i < listed; i += 4) {
      const uint4 four = reinterpret_cast<const uint4&>(s.listed_rank[i]);
      number += (four.x > rank) + (four.y > rank) + (four.z > rank) + (four.w > rank);
    }
    if (number < nodes) {
      s.listed[number] = static_cast<uint16_t>(t);
      s.number[name >> 8][name & 0xff] = static_cast<uint8_t>(number);
    }
  }
  __syncthreads();
  return min(listed + 1, nodes);
}

template <int kWords>
__global__ void __launch_bounds__(kThreads, 2) ngram_draft_kernel(NgramDraftParams p) {
  begin_kernel();
  __shared__ Row<kWords> s;
  const int64_t row = blockIdx.x;
  const auto i = static_cast<int32_t>(threadIdx.x);
  const Request request = find_request(p, row);
  if (i < kWarp) s.context[i] = request.context;
  if (i == 0) s.longest = s.log2_total = s.segments = 0;
  const int rounds = find_places(p, request, s);
  __syncthreads();
  const int candidates = find_candidates(p, request, rounds, s);
  int count = request.context_len > 0;
  if (candidates > 0) {
    compare_texts(request, s, candidates);
    find_segments(p, s, candidates);
    count = number_nodes(p, s);
  }

  TreeHead head;
  const int32_t root = __shfl_sync(kFullMask, request.context, 0);
  if (count > 0) head = {.count = count, .root_token = root, .seq_len = p.seq_lens[row]};
  int32_t token = head.root_token, parent = -1;
  float score = i == 0 && count > 0 ? 0 : -INFINITY;
  if (i > 0 && i < count) {
    const uint32_t name = s.listed_name[s.listed[i]], rank = s.listed_rank[s.listed[i]], owner = name >> 8,
                   depth = name & 0xff, leaves = s.leaves[owner];
    const uint32_t above = depth == (leaves & 0xff) + 1 ? leaves : name - 1;
    token = s.text[owner][depth - 1];
    parent = above == 0 ? 0 : s.number[above >> 8][above & 0xff];
    score = ngram_score(static_cast<int32_t>(rank >> kNgramTieBits) - kNgramRankBase - s.log2_total);
  }
  if (i < p.out.nodes) p.out_scores[row * p.out.nodes + i] = score;
  __syncthreads();
  if (i >= s.nodes.kNodes) return;  // who is left waits for fewer
  clear_nodes(s.nodes);
  __syncthreads();
  write_nodes(p.out, row, head, token, parent, s.nodes);
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
