// ngram_insert on a GPU: update a set with eight lanes.
#pragma once

#include "core/warp.cuh"
#include "ngram/layout.h"

namespace specdec::ngram::insert {

// Sets in the registers of a warp, eight lanes each, one per entry. All lanes of the warp execute everything.
struct SetLanes {
  int way;
  uint32_t meta, newest, older[kNgramOlder];
  bool changed = false;

  __device__ void load(const NgramSet& set) {
    meta = set.meta[way];
    newest = set.newest[way];
    const auto* twos = reinterpret_cast<const uint2*>(set.older[way]);
#pragma unroll
    for (int i = 0; i < kNgramOlder / 2; ++i) {
      const uint2 two = twos[i];
      older[2 * i] = two.x;
      older[2 * i + 1] = two.y;
    }
  }
  __device__ void store(NgramSet& set) const {
    if (!changed) return;
    set.meta[way] = meta;
    set.newest[way] = newest;
    auto* twos = reinterpret_cast<uint2*>(set.older[way]);
#pragma unroll
    for (int i = 0; i < kNgramOlder / 2; ++i) twos[i] = {older[2 * i], older[2 * i + 1]};
  }
  // Return a bitmask of the set's lanes for which `is` holds.
  __device__ uint32_t which(bool is) const {
    return __ballot_sync(kFullMask, is) >> (lane_id() - way) & ((1u << kNgramWays) - 1);
  }
  __device__ bool is_first_of(uint32_t lanes) const { return __ffs(static_cast<int>(lanes)) - 1 == way; }

  // Apply ngram_update (append.h) if `wanted`.
  __device__ void update(const NgramView& v, bool wanted, uint32_t tag, uint32_t position, uint32_t& entries,
                         uint32_t& evictions) {
    const uint32_t hits = which((meta ^ tag) < 256), empty = which((meta & 0xff) == 0);
    const bool is_new = wanted && hits == 0, evicts = is_new && empty == 0;
    uint32_t victims = empty;
    if (__any_sync(kFullMask, evicts)) {
      const uint32_t age = ngram_age(v, newest, position);
      uint32_t oldest = age;
#pragma unroll
      for (int step = 1; step < kNgramWays; step *= 2) oldest = max(oldest, __shfl_xor_sync(kFullMask, oldest, step));
      const uint32_t lanes = which(age == oldest);
      if (evicts) victims = lanes;
    }
    if (wanted && is_first_of(hits)) {
#pragma unroll
      for (int i = kNgramOlder - 1; i > 0; --i) older[i] = older[i - 1];
      older[0] = newest;
      newest = position;
      meta += (meta & 0xff) < 0xff;
      changed = true;
    }
    if (is_new && is_first_of(victims)) {
      entries += !evicts;
      evictions += evicts;
      meta = tag | 1;
      newest = position;
      changed = true;
    }
  }
};

}  // namespace specdec::ngram::insert
