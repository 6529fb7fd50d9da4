// ngram_draft on a GPU, part 1: list the occurrences of the context's n-grams from the table, and the followed one.
#pragma once

#include "ngram/append.h"
#include "ngram/draft/row.cuh"

namespace specdec::ngram::draft {

// List the occurrences of the n-grams at the end of the context, one warp per n-gram, and the followed one. Return the
// rounds needed to verify the maximum number of them.
template <class Row>
__device__ __forceinline__ int find_occurrences(const NgramDraftParams& p, const Request& request, Row& s) {
  const NgramView& v = p.index;
  const int lane = lane_id(), order = kNgramOrders - 1 - warp_id() % kNgramOrders, rank = warp_id() / kNgramOrders;
  NgramSlot slot;
  slot.scope = request.scope, slot.group = request.group;
  uint32_t scopes[kNgramScopes];
  const int num_scopes = request.context_len > 0 ? ngram_find_scopes(slot, p.weights, scopes) : 0;
  if (warp_id() == kNgrams) {
    const int rest = 1 + num_scopes * kNgramOrders * kNgramRecent;
    if (rest + lane < num_scopes * kParallel) s.occurrences.position[rest + lane] = kNgramNone;
    const int last = ngram_followed(request.followed, request.length);
    const NgramFollowed followed{last == 0 ? request.followed[0].position : request.followed[1].position,
                                 last == 0 ? request.followed[0].length : request.followed[1].length};
    const uint32_t continued = num_scopes > 0 ? ngram_follow(v, followed, request.length) : kNgramNone;
    if (lane == 0) s.occurrences.position[0] = continued;
  }
  if (rank >= num_scopes) return num_scopes;
  const uint32_t scope = rank == 0 ? scopes[0] : rank == 1 ? scopes[1] : scopes[2];
  uint64_t hash = ngram_hash_seed(scope);
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kNgramMaxOrder; ++n) {
    const uint64_t longer = ngram_hash_step(hash, __shfl_sync(kFullMask, request.context, n));
    hash = n < 1 << order ? longer : hash;
  }
  const uint64_t key = ngram_key(hash, order);
  const int i = warp_id() % kNgramOrders * num_scopes + rank;
  s.occurrences.set[i][lane] = reinterpret_cast<const uint4*>(v.sets + ngram_set_of(v, key))[lane];
  __syncwarp();
  const auto& set = reinterpret_cast<const NgramSet&>(s.occurrences.set[i]);
  const uint32_t meta = set.meta[lane % kNgramWays];
  const uint32_t hits = __ballot_sync(kFullMask, (meta ^ ngram_tag(key)) < 256);
  const int way = hits == 0 ? 0 : first_bit(hits);
  const auto count = static_cast<int>(__shfl_sync(kFullMask, meta, way) & 0xff);
  const int held = hits != 0 && request.context_len >= 1 << order ? min(count, kNgramRecent) : 0;
  if (lane < kNgramRecent) {
    const uint32_t position = lane == 0 ? set.newest[way] : set.older[way][max(lane, 1) - 1];
    s.occurrences.position[1 + i * kNgramRecent + lane] = lane < held ? position : kNgramNone;  // no position
  }
  if (lane == 0) {
    s.occurrences.scope[i] = scope;
    s.occurrences.min_match[i] = 1 << order;
  }
  return num_scopes;
}

}  // namespace specdec::ngram::draft
