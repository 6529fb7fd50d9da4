// The threads that find and apply the updates of the table.
#pragma once

#include "core/bits.h"
#include "ngram/append.h"
#include "ngram/insert/plan.cuh"
#include "ngram/insert/set_lanes.cuh"

namespace specdec::ngram_insert {

// Tokens that are checked together.
struct TokenBatch {
  static constexpr uint32_t kTokens = 4;
  int32_t token[kTokens];

  __device__ void load(const NgramInsertParams& p, uint32_t begin, uint32_t cells) {
#pragma unroll
    for (uint32_t k = 0; k < kTokens; ++k) {
      const uint32_t cell = begin + k * kUpdaters;
      token[k] = cell < cells ? p.tokens[cell] : 0;
    }
  }
  __device__ void check(const NgramInsertParams& p, uint32_t begin, Plan& s) const {
    uint32_t bad = 0;
#pragma unroll
    for (uint32_t k = 0; k < kTokens; ++k) bad |= static_cast<uint32_t>(token[k] < 0) << k;
#pragma unroll 1
    for (; bad != 0; bad &= bad - 1) {
      const uint32_t cell = begin + (__ffs(static_cast<int>(bad)) - 1) * kUpdaters;
      const auto width = static_cast<uint32_t>(p.width);
      atomicMin(&s.first_bad[cell / width], p.lengths == nullptr ? 0 : cell % width);
    }
  }
};

// What one token changes of the table. Of a block's own sets; of the others kNoSet.
struct TokenUpdates {
  uint32_t sets[kNgramOrders], tags[kNgramOrders];

  __device__ void find(const NgramInsertParams& p, const Plan& s, const Cells& cells, uint32_t cell) {
#pragma unroll
    for (uint32_t& set : sets) set = kNoSet;
    if (cell >= cells.all) return;
    const NgramView& v = p.index;
    const uint32_t b = cells.row(cell), j = cells.token(cell), start = s.start[b], tokens = s.tokens_of(b);
    if (j >= tokens) return;
    const int32_t* text = row_tokens(p, b, tokens) + j;
    const int32_t* tail = s.tail[b];
    const uint32_t at = start + j;
    int32_t before[kNgramLongest];
#pragma unroll
    for (uint32_t n = 1; n <= kNgramLongest; ++n)
      before[n - 1] = n <= j ? text[-static_cast<int>(n)] : tail[(at - n) % kNgramMaxMatch];
    uint64_t keys[kNgramOrders];
    ngram_keys(s.scope[b], [&](int i) { return before[i - 1]; }, keys);
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      const uint32_t set = ngram_set_of(v, keys[order]);
      tags[order] = ngram_tag(keys[order]);
      if (at < 1u << order || (set & (gridDim.x - 1)) != blockIdx.x) continue;
      sets[order] = set;
      prefetch(v.sets[set]);
    }
  }

  // Of this lane and those before it, and of the warp.
  __device__ void count(uint32_t& before, uint32_t& all) const {
    before = all = 0;
    __syncwarp();
#pragma unroll
    for (const uint32_t set : sets) {
      const uint32_t lanes = __ballot_sync(kFullMask, set != kNoSet);
      before += __popc(lanes & ((1u << lane_id()) - 1));
      all += __popc(lanes);
    }
  }
};

// Where the j-th token of row b goes.
__device__ __forceinline__ uint32_t position_of(const NgramInsertParams& p, const Plan& s, uint32_t b, uint32_t j) {
  const uint32_t at = s.start[b] % kNgramBlockTokens + j, k = at / kNgramBlockTokens;
  const bool is_old = s.goes_on[b] && k == 0;
  const uint32_t id = is_old ? s.last[b] : ngram_id_after(p.index, s.next, s.first_block[b] + k - s.goes_on[b]);
  return id << kNgramOffsetBits | at % kNgramBlockTokens;
}

// Applies a lot in order: those of the list from `begin` on, at most kLot. Eight lanes have an update, and the first of
// those of a set does them all.
__device__ __forceinline__ void apply(const NgramInsertParams& p, const Plan& s, const Cells& cells, uint32_t begin,
                                      uint32_t count, uint32_t& entries, uint32_t& evictions) {
  const NgramView& v = p.index;
  const uint32_t *sets = s.updates.sets + begin, *tags = s.updates.tags + begin, *its_cells = s.updates.cells + begin;
  const int way = lane_id() % kNgramWays;
  const uint32_t i = threadIdx.x / kNgramWays, set = i < count ? sets[i] : kNoSet;
  if (warp_id() * (kWarp / kNgramWays) >= static_cast<int>(count)) return;
  SetLanes own{.way = way, .meta = 0, .newest = 0, .older = {}};
  own.load(v.sets[i < count ? set : 0]);  // on its way while the lot is looked through
  uint64_t same = 0;                      // bit j: update j is of this set
  __syncwarp();
#pragma unroll
  for (uint32_t part = 0; part < kLot; part += kNgramWays) {
    const uint32_t j = part + way, other = j < count ? sets[j] : kNoSet;
    same |= uint64_t{own.which(other == set)} << part;
  }
  if (i >= count || (same & low_bits(i)) != 0) same = 0;
#pragma unroll 1
  while (true) {
    // Each lane finds one of them, then all do them.
    const int left = __popcll(same), most = __reduce_max_sync(kFullMask, left);
    uint64_t mine = same;
    if (most > 1) {
#pragma unroll
      for (int k = 0; k < kNgramWays - 1; ++k) mine &= mine - (k < way ? 1 : 0);
    }
    const uint32_t j = mine != 0 ? __ffsll(static_cast<long long>(mine)) - 1 : 0;
    const uint32_t cell = its_cells[j], tag = tags[j], position = position_of(p, s, cells.row(cell), cells.token(cell));
#pragma unroll 1
    for (int k = 0; k < min(most, kNgramWays); ++k)
      own.update(v, k < left, __shfl_sync(kFullMask, tag, k, kNgramWays),
                 __shfl_sync(kFullMask, position, k, kNgramWays), entries, evictions);
    if (most <= kNgramWays) break;
#pragma unroll
    for (int k = 0; k < kNgramWays; ++k) same &= same - 1;
  }
  own.store(v.sets[i < count ? set : 0]);
}

// What an updater does: finds the updates of the block's own sets, tile after tile, and applies them.
template <bool kIsRound>
__device__ __forceinline__ void update(const NgramInsertParams& p, Plan& s) {
  const NgramView& v = p.index;
  auto* const work = static_cast<NgramWork*>(p.work);
  const auto rows = static_cast<uint32_t>(p.rows), all_cells = static_cast<uint32_t>(p.rows * p.width);
  const uint32_t i = threadIdx.x;
  const int lane = lane_id(), warp = warp_id();

  // Tokens and tails, all on their way together. Warps that have none stay out of the others' way.
  const bool has_tokens = i - lane < all_cells;
  TokenBatch batch;
  if (has_tokens) batch.load(p, i, all_cells);
  if (i < kNgramRows) s.first_bad[i] = kNgramNone;
  if ((i - lane) / kTailParts < rows) {
    constexpr uint32_t kTurns = kNgramRows * kTailParts / kUpdaters;
    int64_t slots[kTurns];
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint32_t b = (turn * kUpdaters + i) / kTailParts;
      slots[turn] = b < rows ? slot_of_row(p, b) : -1;
    }
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint32_t b = (turn * kUpdaters + i) / kTailParts, at = i % kTailParts * 4;
      if (slots[turn] >= 0) copy_ahead(&s.tail[b][at], &stream_of(p, work, slots[turn]).tail[at]);
    }
  }
  wait_at(kOfUpdaters);
  if (has_tokens) batch.check(p, i, s);
#pragma unroll 1
  for (uint32_t begin = i + TokenBatch::kTokens * kUpdaters; begin < all_cells;
       begin += TokenBatch::kTokens * kUpdaters) {
    batch.load(p, begin, all_cells);
    batch.check(p, begin, s);
  }
  arrived();
  wait_at(kAll);

  const Cells cells = cells_of<kIsRound>(p, s);
  TokenUpdates found;
  uint32_t entries = 0, evictions = 0, listed = 0;
#pragma unroll 1
  for (uint32_t tile = 0;; tile += kUpdaters) {
    const bool is_end = tile > 0 && tile >= cells.all;
    if (!is_end) found.find(p, s, cells, tile + i);
    if (listed >= kLot || is_end) {  // whole lots, and in the end what is left
      uint32_t done = 0;
#pragma unroll 1
      while (true) {
        apply(p, s, cells, done, min(listed - done, kLot), entries, evictions);
        done += kLot;
        if (is_end ? done >= listed : done + kLot > listed) break;
        wait_at(kOfUpdaters);
      }
      if (is_end) break;
      wait_at(kOfUpdaters);
      listed -= done;
      if (i < listed) {
        s.updates.sets[i] = s.updates.sets[done + i];
        s.updates.tags[i] = s.updates.tags[done + i];
        s.updates.cells[i] = s.updates.cells[done + i];
      }
    }

    uint32_t before, all;
    found.count(before, all);
    if (lane == 0) s.found[warp] = all;
    wait_at(kOfUpdaters);
    const uint32_t of_warp = lane < kUpdaterWarps ? s.found[lane] : 0;
    uint32_t at = listed + before + __reduce_add_sync(kFullMask, lane < warp ? of_warp : 0);
    listed += __reduce_add_sync(kFullMask, of_warp);
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      if (found.sets[order] == kNoSet) continue;
      s.updates.sets[at] = found.sets[order];
      s.updates.tags[at] = found.tags[order];
      s.updates.cells[at++] = tile + i;
    }
    if (tile > 0) {
      wait_at(kOfUpdaters);
    } else {
      wait_at(kAll);
      if (s.in_turn != 0) return;
    }
  }
  __syncwarp();
  entries = __reduce_add_sync(kFullMask, entries);
  evictions = __reduce_add_sync(kFullMask, evictions);
  if (lane == 0) {
    if (entries > 0) atomicAdd(&s.entries, entries);
    if (evictions > 0) atomicAdd(&s.evictions, evictions);
  }
  wait_at(kOfUpdaters);
  if (i == 0) {
    count(v.header->entries, s.entries);
    count(v.header->evictions, s.evictions);
  }
}

}  // namespace specdec::ngram_insert
