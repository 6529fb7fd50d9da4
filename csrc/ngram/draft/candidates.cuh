// ngram_draft on a GPU, part 2: verify and weigh the occurrences, and copy their continuations to smem.
#pragma once

#include "core/cuda.cuh"
#include "ngram/draft/row.cuh"

namespace specdec::ngram::draft {

// A block of the token store in the registers of eight lanes, four words each.
struct BlockWords {
  uint4 words;

  __device__ void load(const NgramView& v, uint32_t index) {
    words = {};  // not a block that any link leads to
    if (index < v.num_blocks) words = reinterpret_cast<const uint4*>(v.blocks + index)[lane_id() % kOctet];
  }
  __device__ uint32_t id() const { return __shfl_sync(kFullMask, words.x, 0, kOctet); }
  __device__ uint32_t owner() const { return __shfl_sync(kFullMask, words.y, 0, kOctet); }
  __device__ uint32_t scope() const { return __shfl_sync(kFullMask, words.z, 0, kOctet); }
  __device__ uint32_t prev() const { return __shfl_sync(kFullMask, words.w, 0, kOctet); }
  __device__ uint32_t next() const { return __shfl_sync(kFullMask, words.x, 1, kOctet); }

  // Return a bitmask, in all lanes, of the words for which `is(word, token)` holds.
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

// An occurrence in eight lanes. All lanes of a warp execute everything, since the ballots need them.
struct Occurrence {
  BlockWords own, before, after;  // its block and the two adjacent in memory
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

  // Count the tokens before word `end` of a block that match the context from its m-th token on.
  template <class Row>
  __device__ static int agree(const BlockWords& block, int end, int m, const Row& s, int context_len) {
    const uint32_t same = block.which([&](int word, int32_t token) {
      const int at = m + end - 1 - word;
      return (word < end) & (at < context_len) & (token == s.context[static_cast<unsigned>(at) % kNgramMaxMatch]);
    });
    return __clz(static_cast<int>(~(same << (kWarp - end))));
  }

  // Continue from block to block, if all of the occurrence's own block up to its end was consumed. consume(block, at,
  // more) returns how much of a block continues after `at` tokens (`more`: whether it counts); stop when that is not
  // the whole block or `most` is reached. The adjacent block is evaluated speculatively, since it is mostly the next
  // one. Return the total.
  template <bool kForward, class Consume>
  __device__ int follow(const NgramView& v, int total, int end, int most, bool wanted, const Consume& consume) const {
    const auto next_of = [](const BlockWords& block) { return kForward ? block.next() : block.prev(); };
    const auto leads_to = [](const BlockWords& block) { return kForward ? block.prev() : block.next(); };
    const BlockWords& adjacent = kForward ? after : before;
    bool more = wanted && total == end && total < most;
    const bool is_adjacent = (adjacent.id() == next_of(own)) & (leads_to(adjacent) == own.id());
    int run = consume(adjacent, end, more && is_adjacent);
    if (more && is_adjacent) {
      total += run;
      more = run == kNgramBlockTokens && total < most;
    }
    BlockWords block = is_adjacent ? adjacent : own;
#pragma unroll 1
    while (__any_sync(kFullMask, more)) {
      const uint32_t id = block.id(), link = next_of(block);
      if (more) block.load(v, link & ((1u << v.block_bits) - 1));
      more &= (block.id() == link) & (leads_to(block) == id);
      run = consume(block, total, more);
      if (more) total += run;
      more &= run == kNgramBlockTokens && total < most;
    }
    return total;
  }

  // Count the tokens before it that match the context.
  template <class Row>
  __device__ int match(const NgramView& v, const Row& s, int context_len) const {
    const int own_match = agree(own, held ? kHead + offset : kHead, 0, s, context_len);
    return follow<false>(v, own_match, offset, context_len, held, [&](const BlockWords& block, int at, bool) {
      return agree(block, kWarp, at, s, context_len);
    });
  }

  // Copy the continuation and return its length.
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

// Verify the occurrences and keep those with a weight until the candidates are full, with their continuations. Return
// their number.
template <class Row>
__device__ __forceinline__ int find_candidates(const NgramDraftParams& p, const Request& request, int rounds, Row& s) {
  static_assert(kParallel == 2 * kWarp);
  const int lane = lane_id(), depths = static_cast<int>(p.out.nodes) - 1;
  int count = 0;
#pragma unroll 1
  for (int begin = 0; begin < rounds * kParallel && count < kNgramCandidates; begin += kParallel) {
    const int i = begin + static_cast<int>(threadIdx.x) / kOctet;
    const int ngram = max(i - 1, 0) / kNgramRecent, age = max(i - 1, 0) % kNgramRecent;
    const uint32_t position = s.occurrences.position[i];
    Occurrence occurrence;
    occurrence.load(p.index, position, depths);
    bool named = false;  // listed by a longer n
#pragma unroll 1
    for (int j = lane % kOctet * 4; j < i; j += 4 * kOctet) {
      const uint4 four = reinterpret_cast<const uint4&>(s.occurrences.position[j]);
      named |= four.x == position || (j + 1 < i && four.y == position) || (j + 2 < i && four.z == position) ||
               (j + 3 < i && four.w == position);
    }
    named = (__ballot_sync(kFullMask, named) >> (lane / kOctet * kOctet) & 0xff) != 0;
    const uint32_t id = occurrence.own.id(), owner = occurrence.own.owner(), scope = occurrence.own.scope();
    const bool seen = i == 0 ? ngram_sees(request.scope, request.group, scope) : scope == s.occurrences.scope[ngram];
    const uint32_t written = occurrence.own.written();
    occurrence.held = occurrence.held && !named && seen && id == position >> kNgramOffsetBits;
    occurrence.held = occurrence.held && (written >> (kHead + occurrence.offset) % kWarp & 1) != 0;
    int match = 0;
    uint64_t weight = 0;
    if (__any_sync(kFullMask, occurrence.held)) match = occurrence.match(p.index, s, request.context_len);
    if (occurrence.held && match >= (i == 0 ? 0 : s.occurrences.min_match[ngram]) && match >= p.min_match)
      weight = ngram_weight(p.weights.of(owner, scope, request.stream), p.weights.recency[age], match);
    if (lane % kOctet == 0) s.occurrences.good[i] = weight > 0;
    __syncthreads();

    const uint64_t low = __ballot_sync(kFullMask, s.occurrences.good[begin + lane]);
    const uint64_t good = low | uint64_t{__ballot_sync(kFullMask, s.occurrences.good[begin + kWarp + lane])} << kWarp;
    const int at = count + __popcll(good & low_bits(i - begin));
    const bool chosen = weight > 0 && at < kNgramCandidates;
    const int length = occurrence.copy(p.index, chosen, depths, s.text[chosen ? at : 0]);
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
