// ngram_draft on a GPU, part 4: which nodes of the segments are drafted, and in what order.
#pragma once

#include "core/warp.cuh"
#include "ngram/draft/row.cuh"

namespace specdec::ngram::draft {

// The segments in the registers of a warp, two per lane.
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

  // Reduce the tree to a chain, in which each node is the best child of the previous one: other segments lose their
  // nodes.
  template <class Row>
  __device__ void keep_chain(const Row& s) {
    uint32_t rank[2], parent[2], at = 0;
    bool kept[2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t leaves = s.leaves[own[k].owner];
      const bool begins = own[k].start == static_cast<int>(leaves & 0xff);
      parent[k] = begins ? leaves : node_key(own[k].owner, own[k].start);
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
          end = node_key(own[k].owner, own[k].start + own[k].length);
        }
      at = __reduce_max_sync(kFullMask, end);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) own[k].length = kept[k] ? own[k].length : 0;
  }

  // Return the largest log2 p that at least `most` nodes reach. Called by all warps, which try fifteen values at a
  // time.
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

// Assign indices to the tree's nodes and return their number, with the root.
template <class Row>
__device__ __forceinline__ int index_nodes(const NgramDraftParams& p, Row& s) {
  const auto t = static_cast<int>(threadIdx.x), nodes = static_cast<int>(p.out.nodes);
  const int lane = lane_id();
  // Every warp finds the selected nodes and lists those of some segments.
  Segments segments;
  segments.load(s);
  if (p.chain) segments.keep_chain(s);
  const int32_t least = max(segments.bound(nodes - 1), p.min_log2_p + s.log2_total());
  const int kept[2] = {segments.own[0].nodes_from(least), segments.own[1].nodes_from(least)};
  __syncwarp();
  const uint32_t up_to = sum_up_to_lane(static_cast<uint32_t>(kept[0] | kept[1] << 16));
  const uint32_t all = __shfl_sync(kFullMask, up_to, kWarp - 1);
  const int listed = static_cast<int>((all & 0xffff) + (all >> 16));
  const int first[2] = {static_cast<int>(up_to & 0xffff) - kept[0],
                        static_cast<int>((all & 0xffff) + (up_to >> 16)) - kept[1]};
  // Eight lanes per segment.
  static_assert(kMaxSegments <= kParallel);
  const int i = t / kOctet;
  const int here = __shfl_sync(kFullMask, i < kWarp ? kept[0] : kept[1], i % kWarp);
  const int at = __shfl_sync(kFullMask, i < kWarp ? first[0] : first[1], i % kWarp);
#pragma unroll 1
  for (int q = lane % kOctet; q < here; q += kOctet) {
    const Segment& segment = s.segment[i];
    const int depth = segment.start + 1 + q;
    s.listed_rank[at + q] = ngram_rank(segment.log2_p(depth), segment.tie);
    s.listed_key[at + q] = static_cast<uint16_t>(node_key(segment.owner, depth));
  }
  __syncthreads();

  // A node's index is the number of better nodes. Each warp holds all ranks and ballots for some nodes.
  uint32_t rank[Row::kListedParts];
#pragma unroll
  for (int part = 0; part < Row::kListedParts; ++part) {
    const int n = part * kWarp + lane;
    rank[part] = n < listed ? s.listed_rank[n] : 0;
  }
#pragma unroll 1
  for (int n = warp_id(); n < listed; n += kWarps) {
    const uint32_t own = s.listed_rank[n], key = s.listed_key[n];
    int index = 1;
    __syncwarp();
#pragma unroll
    for (const uint32_t other : rank) index += __popc(__ballot_sync(kFullMask, other > own));
    if (lane == 0 && index < nodes) {
      s.listed[index] = static_cast<uint16_t>(n);
      s.node_index[key >> 8][key & 0xff] = static_cast<uint8_t>(index);
    }
  }
  __syncthreads();
  return min(listed + 1, nodes);
}

}  // namespace specdec::ngram::draft
