// The threads that find and apply the updates of the table.
#pragma once

#include "core/bits.h"
#include "core/warp.cuh"
#include "ngram/append.h"
#include "ngram/insert/plan.cuh"
#include "ngram/insert/set_lanes.cuh"

namespace specdec::ngram::insert {

// How many tokens the rows name, by a warp. Whether a row is refused turns out later: then its tokens are not looked
// at.
struct RowLengths {
  static constexpr uint32_t kRows = kNgramRows / kWarp;  // of a lane
  int32_t given[kRows];

  __device__ void load(const NgramInsertParams& p) {
#pragma unroll
    for (uint32_t k = 0; k < kRows; ++k) {
      const uint32_t b = lane_id() * kRows + k;
      given[k] = b < p.rows ? p.lengths[b] : 0;
    }
  }
  __device__ void lay_out(const NgramInsertParams& p, Plan& s) {
    uint32_t sum = 0;
#pragma unroll
    for (int32_t& count : given) {
      if (count < 0 || count > p.width) count = 0;
      sum += count;
    }
    uint32_t before = sum_up_to_lane(sum) - sum;
#pragma unroll
    for (uint32_t k = 0; k < kRows; ++k) {
      s.first_token[lane_id() * kRows + k] = before;
      before += given[k];
    }
    if (lane_id() == kWarp - 1) s.all_tokens = before;
  }
};

// Notes the first token of a row that is below 0, of the tokens from the `begin`-th on. Some are read at a time, which
// counts where there are many.
template <bool kIsRound>
__device__ __forceinline__ void check_tokens(const NgramInsertParams& p, Plan& s, uint32_t begin, uint32_t count) {
  constexpr uint32_t kTogether = kIsRound ? 1 : 4;
#pragma unroll 1
  for (uint32_t first = begin + threadIdx.x; first < count; first += kTogether * kUpdaters) {
    Token token[kTogether];
    int32_t value[kTogether];
#pragma unroll
    for (uint32_t k = 0; k < kTogether; ++k) {
      token[k] = find_token<kIsRound>(s, first + k * kUpdaters);
      value[k] = first + k * kUpdaters < count ? p.tokens[token[k].b * p.width + token[k].j] : 0;
    }
#pragma unroll
    for (uint32_t k = 0; k < kTogether; ++k)
      if (value[k] < 0) atomicMin(&s.first_bad[token[k].b], kIsRound ? token[k].j : 0);
  }
}

// What one token changes of the table. Of a block's own sets; of the others kNoSet.
struct TokenUpdates {
  uint32_t sets[kNgramOrders], tags[kNgramOrders];

  // `starts`: whether the token is among those that s.text has.
  __device__ void find(const NgramInsertParams& p, const Plan& s, const Token& token, bool starts) {
#pragma unroll
    for (uint32_t& set : sets) set = kNoSet;
    const NgramView& v = p.index;
    const auto [b, j] = token;
    const uint32_t tokens = s.tokens_of(b), at = s.start[b] + j;
    if (j >= tokens) return;
    int32_t before[kNgramLongest];
    if (starts) {
#pragma unroll
      for (uint32_t n = 1; n <= kNgramLongest; ++n)
        before[n - 1] = *(n <= j ? &s.text[b][j - n] : &s.tail[b][(at - n) % kNgramMaxMatch]);
    } else {
      const int32_t* text = row_tokens(p, b, tokens) + j;
#pragma unroll
      for (uint32_t n = 1; n <= kNgramLongest; ++n)
        before[n - 1] = n <= j ? text[-static_cast<int>(n)] : s.tail[b][(at - n) % kNgramMaxMatch];
    }
    uint64_t keys[kNgramOrders];
    ngram_keys(s.scope[b], [&](int n) { return before[n - 1]; }, keys);
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

// Where a token goes.
__device__ __forceinline__ uint32_t position_of(const NgramInsertParams& p, const Plan& s, const Token& token) {
  const auto [b, j] = token;
  const uint32_t at = s.start[b] % kNgramBlockTokens + j, k = at / kNgramBlockTokens;
  const bool is_old = s.goes_on[b] && k == 0;
  const uint32_t id = is_old ? s.last[b] : ngram_id_after(p.index, s.next, s.first_block[b] + k - s.goes_on[b]);
  return id << kNgramOffsetBits | at % kNgramBlockTokens;
}

// Applies a lot in order: those of the list from `begin` on, at most kLot. Eight lanes have an update, and the first of
// those of a set does them all.
__device__ __forceinline__ void apply(const NgramInsertParams& p, const Plan& s, uint32_t begin, uint32_t count,
                                      uint32_t& entries, uint32_t& evictions) {
  const NgramView& v = p.index;
  const uint32_t *sets = s.updates.sets + begin, *tags = s.updates.tags + begin, *tokens = s.updates.tokens + begin;
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
    const uint32_t tag = tags[j], position = position_of(p, s, Token::named(tokens[j]));
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
  const auto rows = static_cast<uint32_t>(p.rows);
  const uint32_t i = threadIdx.x;
  const int lane = lane_id(), warp = warp_id();

  // Tokens and tails, all on their way together. Warps that have none stay out of the others' way.
  RowLengths lengths;
  const bool lays_out = kIsRound && warp == kUpdaterWarps - 1;
  if (lays_out) lengths.load(p);
  if constexpr (kIsRound) {
#pragma unroll
    for (uint32_t cell = i; cell < kNgramRows * kFirstTokens; cell += kUpdaters) {
      const uint32_t b = cell / kFirstTokens, j = cell % kFirstTokens;
      if (b < rows && j < p.width) copy_word_ahead(&s.text[b][j], p.tokens + b * p.width + j);
    }
    words_on_their_way();
  }
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
  if (lays_out) lengths.lay_out(p, s);
  words_arrived();
  wait_at(kOfUpdaters);
  // Of a round, the first tokens are found and checked while the records are on their way.
  Token token{.b = 0, .j = kNoToken};
  if constexpr (kIsRound) {
    const uint32_t named = s.all_tokens;
    if (i < named) {
      token = find_token<true>(s, i);
      const int32_t* text = token.j < kFirstTokens ? &s.text[token.b][token.j] : row_tokens(p, token.b, 0) + token.j;
      if (*text < 0) atomicMin(&s.first_bad[token.b], token.j);
    }
    check_tokens<true>(p, s, kUpdaters, named);
  } else {
    check_tokens<false>(p, s, 0, static_cast<uint32_t>(p.width));
  }
  arrived();
  wait_at(kAll);

  const uint32_t all_tokens = kIsRound ? s.all_tokens : s.tokens_of(0);
  TokenUpdates found;
  uint32_t entries = 0, evictions = 0, listed = 0;
#pragma unroll 1
  for (uint32_t tile = 0;; tile += kUpdaters) {
    const bool is_end = tile > 0 && tile >= all_tokens;
    if (!is_end) {
      const bool is_first = kIsRound && tile == 0;
      if (!is_first) token = find_token<kIsRound>(s, tile + i);
      found.find(p, s, token, is_first && token.j < kFirstTokens);
    }
    if (listed >= kLot || is_end) {  // whole lots, and in the end what is left
      uint32_t done = 0;
#pragma unroll 1
      while (true) {
        apply(p, s, done, min(listed - done, kLot), entries, evictions);
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
        s.updates.tokens[i] = s.updates.tokens[done + i];
      }
    }

    uint32_t of_lanes, all;
    found.count(of_lanes, all);
    if (lane == 0) s.found[warp] = all;
    wait_at(kOfUpdaters);
    const uint32_t of_warp = lane < kUpdaterWarps ? s.found[lane] : 0;
    uint32_t at = listed + of_lanes + __reduce_add_sync(kFullMask, lane < warp ? of_warp : 0);
    listed += __reduce_add_sync(kFullMask, of_warp);
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      if (found.sets[order] == kNoSet) continue;
      s.updates.sets[at] = found.sets[order];
      s.updates.tags[at] = found.tags[order];
      s.updates.tokens[at++] = token.name();
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

}  // namespace specdec::ngram::insert
