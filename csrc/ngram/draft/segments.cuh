// ngram_draft on a GPU, part 3: the trie of all candidates as segments, consecutive nodes whose path the same
// candidates share.
#pragma once

#include "ngram/draft/row.cuh"

namespace specdec::ngram::draft {

// Sum a warp's weights, which are below 2^45.
__device__ __forceinline__ uint64_t sum_weights(uint64_t weight) {
  const uint32_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(weight) & 0xffffff);
  return low + (uint64_t{__reduce_add_sync(kFullMask, static_cast<uint32_t>(weight >> 24))} << 24);
}

// Compute the common prefix length of any two continuations, one lane per pair, and what is needed of all candidates.
template <class Row>
__device__ __forceinline__ void compare_texts(const Request& request, Row& s, int count) {
  const int lane = lane_id();
  // A warp has the pairs of its candidate with later ones, and in its other lanes those of the candidate as far from
  // the end.
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
    const auto longest_match = __reduce_max_sync(kFullMask, static_cast<unsigned>(own.match));
    const uint64_t total = sum_weights(own.weight);
    const int best = first_bit(__ballot_sync(kFullMask, lane < count && own.match == static_cast<int>(longest_match)));
    if (lane == 0) {  // the next draft follows this one; a single store, since another row may have the same slot
      const int last = ngram_followed(request.followed, request.length);
      reinterpret_cast<uint2&>(request.slot->followed[1 - last]) = {s.position[best], request.length};
      s.longest_match = static_cast<int>(longest_match);
      s.weight[kMaxSegments] = total;
      s.segment[kMaxSegments].step = 1;
    }
  }
  __syncthreads();
}

// Find the segments of the candidates' trie, in any order: one warp for the segments of which a candidate is the first,
// from the last one to the one that starts where the candidate diverges from earlier ones.
template <class Row>
__device__ __forceinline__ void find_segments(const NgramDraftParams& p, Row& s, int count) {
  const int lane = lane_id();
  const Candidate candidate = lane < count ? s.candidate[lane] : Candidate{0, 0, 0};
  for (int i = warp_id(); i < count; i += kWarps) {
    const int end = lane < count ? s.shared[i][lane] : 0;
    __syncwarp();
    const auto begin = static_cast<int>(__reduce_max_sync(kFullMask, static_cast<unsigned>(lane < i ? end : 0)));
    const uint32_t there = __ballot_sync(kFullMask, lane < i && end == begin);
    if (lane == 0) s.leaves[i] = begin > 0 ? node_key(static_cast<uint32_t>(first_bit(there)), begin) : 0;
    int ends = s.candidate[i].length;  // it agrees with itself to its end
#pragma unroll 1
    while (ends > begin) {
      const bool in = lane >= i && end >= ends;
      __syncwarp();
      const uint64_t weight = sum_weights(in ? candidate.weight : 0);
      const auto match =
          static_cast<int>(__reduce_max_sync(kFullMask, static_cast<unsigned>(in ? candidate.match : 0)));
      const auto start =
          max(begin, static_cast<int>(__reduce_max_sync(kFullMask, static_cast<unsigned>(in ? 0 : end))));
      if (lane == 0) {
        const int at = atomicAdd(&s.segments, 1);
        s.weight[at] = weight;
        s.segment[at] = {.log2_w = 0,
                         .step = p.step[match],
                         .per_step = 0,
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

// Compute the logarithms of all segments and of all candidates at once, since each takes long.
template <class Row>
__device__ __forceinline__ void compute_logarithms(Row& s) {
  if (const auto i = static_cast<int>(threadIdx.x); i < s.segments || i == kMaxSegments) {
    Segment& segment = s.segment[i];
    segment.log2_w = ngram_log2(s.weight[i]);
    segment.per_step = 0xffffffffu / static_cast<uint32_t>(segment.step) + 1;
  }
  __syncthreads();
}

}  // namespace specdec::ngram::draft
