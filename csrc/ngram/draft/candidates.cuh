// What the text at those places is worth, and what follows it.
#pragma once

#include "core/cuda.cuh"
#include "ngram/draft/row.cuh"

namespace specdec::ngram::draft {

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
    for (int c = 0; c < 4; ++c) bits |= static_cast<uint32_t>((first + c >= kHead) & is(first + c, token(c))) << c;
    bits <<= first;
#pragma unroll
    for (int step = 1; step < kOctet; step *= 2) bits |= __shfl_xor_sync(kFullMask, bits, step);
    return bits;
  }
  __device__ uint32_t written() const {
    return which([](int, int32_t token) { return token >= 0; });
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
      prefetch(v.blocks + index + further);
  }

  // How many of its block's tokens before word `end` agree with the context from its m-th token on.
  template <class Row>
  __device__ static int agree(const BlockWords& block, int end, int m, const Row& s, int context_len) {
    const uint32_t same = block.which([&](int word, int32_t token) {
      const int at = m + end - 1 - word;
      return (word < end) & (at < context_len) & (token == s.context[static_cast<unsigned>(at) % kNgramMaxMatch]);
    });
    return __clz(static_cast<int>(~(same << (kWarp - end))));
  }

  // Goes on from block to block, where all of a place's own block up to its end was `taken`: take(block, at, more) is
  // how much of a block goes on behind `at` tokens (`more`: if it counts), and so until that is not all, or `most` is
  // reached. What the block beside says is asked at once, as it is most often the next. Returns how many were taken.
  template <bool kForward, class Take>
  __device__ int follow(const NgramView& v, int taken, int end, int most, bool wanted, const Take& take) const {
    const auto next_of = [](const BlockWords& block) { return kForward ? block.next() : block.prev(); };
    const auto leads_to = [](const BlockWords& block) { return kForward ? block.prev() : block.next(); };
    const BlockWords& beside = kForward ? after : before;
    bool more = wanted && taken == end && taken < most;
    const bool is_beside = (beside.id() == next_of(own)) & (leads_to(beside) == own.id());
    int run = take(beside, end, more && is_beside);
    if (more && is_beside) {
      taken += run;
      more = run == kNgramBlockTokens && taken < most;
    }
    BlockWords block = is_beside ? beside : own;
#pragma unroll 1
    while (__any_sync(kFullMask, more)) {
      const uint32_t id = block.id(), link = next_of(block);
      if (more) block.load(v, link & ((1u << v.block_bits) - 1));
      more &= (block.id() == link) & (leads_to(block) == id);
      run = take(block, taken, more);
      if (more) taken += run;
      more &= run == kNgramBlockTokens && taken < most;
    }
    return taken;
  }

  // How many tokens before it agree with the context.
  template <class Row>
  __device__ int match(const NgramView& v, const Row& s, int context_len) const {
    const int own_match = agree(own, held ? kHead + offset : kHead, 0, s, context_len);
    return follow<false>(v, own_match, offset, context_len, held, [&](const BlockWords& block, int at, bool) {
      return agree(block, kWarp, at, s, context_len);
    });
  }

  // Copies what follows, and returns how much it is.
  __device__ int copy(const NgramView& v, bool wanted, int depths, int32_t* text) const {
    const auto copy_block = [&](const BlockWords& block, int from, int depth, bool more) {
      const uint32_t written = block.written();  // by all lanes
      const int run = more ? first_bit(~(written >> (kHead + from))) : 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int k = lane_id() % kOctet * 4 + c - kHead - from;
        if (k >= 0 && k < run && depth + k < depths) text[depth + k] = block.token(c);
      }
      return run;
    };
    const int from = wanted ? offset : 0, own_run = copy_block(own, from, 0, wanted);
    const int depth =
        follow<true>(v, own_run, kNgramBlockTokens - from, depths, wanted,
                     [&](const BlockWords& block, int at, bool more) { return copy_block(block, 0, at, more); });
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
    const uint32_t written = place.own.written();
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

}  // namespace specdec::ngram::draft
