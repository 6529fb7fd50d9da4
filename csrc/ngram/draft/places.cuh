// Where a stream's text might go on: the places that the table names, and the one followed.
#pragma once

#include "ngram/append.h"
#include "ngram/draft/row.cuh"

namespace specdec::ngram::draft {

// The places of the n-grams that end the context, a warp each, and that which is followed. Returns how many rounds it
// takes to verify as many as there may be.
template <class Row>
__device__ __forceinline__ int find_places(const NgramDraftParams& p, const Request& request, Row& s) {
  const NgramView& v = p.index;
  const int lane = lane_id(), order = kNgramOrders - 1 - warp_id() % kNgramOrders, rank = warp_id() / kNgramOrders;
  NgramSlot slot;
  slot.scope = request.scope, slot.group = request.group;
  uint32_t scopes[kNgramScopes];
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
  __syncwarp();
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

}  // namespace specdec::ngram::draft
