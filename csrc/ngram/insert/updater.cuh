// ngram_insert on a GPU: updater threads, which find and apply the updates of the table.
#pragma once

#include "core/bits.h"
#include "core/warp.cuh"
#include "ngram/append.h"
#include "ngram/insert/plan.cuh"
#include "ngram/insert/set_lanes.cuh"

namespace specdec::ngram::insert {

// Token counts of the rows, in one warp. Whether a row is rejected is known later: then its tokens are ignored.
struct RowLengths {
  static constexpr uint32_t kRows = kNgramMaxRows / kWarp;  // per lane
  int32_t given[kRows];

  __device__ void load(const NgramInsertParams& p) {
#pragma unroll
    for (uint32_t k = 0; k < kRows; ++k) {
      const uint32_t b = lane_id() * kRows + k;
      given[k] = b < p.rows ? p.lengths[b] : 0;
    }
  }
  __device__ void prefix_sum(const NgramInsertParams& p, Plan& s) {
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

// Record the first negative token of each row, from the `begin`-th token on. In bulk several are loaded at a time.
template <bool kIsRound>
__device__ __forceinline__ void check_tokens(const NgramInsertParams& p, Plan& s, uint32_t begin, uint32_t count) {
  constexpr uint32_t kParallel = kIsRound ? 1 : 4;
#pragma unroll 1
  for (uint32_t first = begin + threadIdx.x; first < count; first += kParallel * kUpdaters) {
    Token token[kParallel];
    int32_t value[kParallel];
#pragma unroll
    for (uint32_t k = 0; k < kParallel; ++k) {
      token[k] = find_token<kIsRound>(s, first + k * kUpdaters);
      value[k] = first + k * kUpdaters < count ? p.tokens[token[k].b * p.width + token[k].j] : 0;
    }
#pragma unroll
    for (uint32_t k = 0; k < kParallel; ++k)
      if (value[k] < 0) atomicMin(&s.first_bad[token[k].b], kIsRound ? token[k].j : 0);
  }
}

// Table updates of one token: those of the block's own sets; kNoSet for the others.
struct TokenUpdates {
  uint32_t sets[kNgramOrders], tags[kNgramOrders];

  // `starts`: whether s.text contains the token.
  __device__ void find(const NgramInsertParams& p, const Plan& s, const Token& token, bool starts) {
#pragma unroll
    for (uint32_t& set : sets) set = kNoSet;
    const NgramView& v = p.index;
    const auto [b, j] = token;
    const uint32_t tokens = s.tokens_of(b), at = s.start[b] + j;
    if (j >= tokens) return;
    int32_t before[kNgramMaxOrder];
    if (starts) {
#pragma unroll
      for (uint32_t n = 1; n <= kNgramMaxOrder; ++n)
        before[n - 1] = *(n <= j ? &s.text[b][j - n] : &s.tail[b][(at - n) % kNgramMaxMatch]);
    } else {
      const int32_t* text = row_tokens(p, b, tokens) + j;
#pragma unroll
      for (uint32_t n = 1; n <= kNgramMaxOrder; ++n)
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

  // Count the updates of this lane and those before it, and of the warp.
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

// Return the position at which a token is stored.
__device__ __forceinline__ uint32_t position_of(const NgramInsertParams& p, const Plan& s, const Token& token) {
  const auto [b, j] = token;
  const uint32_t at = s.start[b] % kNgramBlockTokens + j, k = at / kNgramBlockTokens;
  const bool is_old = s.continues[b] && k == 0;
  const uint32_t id = is_old ? s.last[b] : ngram_id_after(p.index, s.next, s.first_block[b] + k - s.continues[b]);
  return id << kNgramOffsetBits | at % kNgramBlockTokens;
}

// Apply a batch of updates in order: from `begin` in the list, at most kUpdateBatch. Eight lanes hold an update, and
// the first ones of a set apply all of that set's.
__device__ __forceinline__ void apply(const NgramInsertParams& p, const Plan& s, uint32_t begin, uint32_t count,
                                      uint32_t& entries, uint32_t& evictions) {
  const NgramView& v = p.index;
  const uint32_t *sets = s.updates.sets + begin, *tags = s.updates.tags + begin, *tokens = s.updates.tokens + begin;
  const int way = lane_id() % kNgramWays;
  const uint32_t i = threadIdx.x / kNgramWays, set = i < count ? sets[i] : kNoSet;
  if (warp_id() * (kWarp / kNgramWays) >= static_cast<int>(count)) return;
  SetLanes own{.way = way, .meta = 0, .newest = 0, .older = {}};
  own.load(v.sets[i < count ? set : 0]);  // in flight while the batch is scanned
  uint64_t same = 0;                      // bit j: update j is of this set
  __syncwarp();
#pragma unroll
  for (uint32_t part = 0; part < kUpdateBatch; part += kNgramWays) {
    const uint32_t j = part + way, other = j < count ? sets[j] : kNoSet;
    same |= uint64_t{own.which(other == set)} << part;
  }
  if (i >= count || (same & low_bits(i)) != 0) same = 0;
#pragma unroll 1
  while (true) {
    // Each lane finds one of them, then all apply them.
    const int left = __popcll(same), most = __reduce_max_sync(kFullMask, left);
    uint64_t mine = same;
    if (most > 1) {
#pragma unroll
      for (int k = 0; k < kNgramWays - 1; ++k) mine &= mine - (k < way ? 1 : 0);
    }
    const uint32_t j = mine != 0 ? __ffsll(static_cast<long long>(mine)) - 1 : 0;
    const uint32_t tag = tags[j], position = position_of(p, s, Token::from_packed(tokens[j]));
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

// Run an updater: find the updates of the block's own sets, tile by tile, and apply them.
template <bool kIsRound>
__device__ __forceinline__ void update(const NgramInsertParams& p, Plan& s) {
  const NgramView& v = p.index;
  auto* const work = static_cast<NgramWork*>(p.work);
  const auto rows = static_cast<uint32_t>(p.rows);
  const uint32_t i = threadIdx.x;
  const int lane = lane_id(), warp = warp_id();

  // Tokens and tails, all in flight together. Warps without work stay out of the way.
  RowLengths lengths;
  const bool sums_lengths = kIsRound && warp == kUpdaterWarps - 1;
  if (sums_lengths) lengths.load(p);
  if constexpr (kIsRound) {
#pragma unroll
    for (uint32_t cell = i; cell < kNgramMaxRows * kFirstTokens; cell += kUpdaters) {
      const uint32_t b = cell / kFirstTokens, j = cell % kFirstTokens;
      if (b < rows && j < p.width) copy_word_async(&s.text[b][j], p.tokens + b * p.width + j);
    }
    commit_words();
  }
  if (i < kNgramMaxRows) s.first_bad[i] = kNgramNone;
  if ((i - lane) / kTailParts < rows) {
    constexpr uint32_t kTurns = kNgramMaxRows * kTailParts / kUpdaters;
    int64_t slots[kTurns];
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint32_t b = (turn * kUpdaters + i) / kTailParts;
      slots[turn] = b < rows ? slot_of_row(p, b) : -1;
    }
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint32_t b = (turn * kUpdaters + i) / kTailParts, at = i % kTailParts * 4;
      if (slots[turn] >= 0) copy_async(&s.tail[b][at], &stream_of(p, work, slots[turn]).tail[at]);
    }
  }
  if (sums_lengths) lengths.prefix_sum(p, s);
  wait_for_words();
  wait_at(kUpdaterThreads);
  // In a round, find and check the first tokens while the records are in flight.
  Token token{.b = 0, .j = kNoToken};
  if constexpr (kIsRound) {
    const uint32_t from_packed = s.all_tokens;
    if (i < from_packed) {
      token = find_token<true>(s, i);
      const int32_t* text = token.j < kFirstTokens ? &s.text[token.b][token.j] : row_tokens(p, token.b, 0) + token.j;
      if (*text < 0) atomicMin(&s.first_bad[token.b], token.j);
    }
    check_tokens<true>(p, s, kUpdaters, from_packed);
  } else {
    check_tokens<false>(p, s, 0, static_cast<uint32_t>(p.width));
  }
  wait_for_copies();
  wait_at(kAllThreads);

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
    if (listed >= kUpdateBatch || is_end) {  // whole batches, and at the end the rest
      uint32_t done = 0;
#pragma unroll 1
      while (true) {
        apply(p, s, done, min(listed - done, kUpdateBatch), entries, evictions);
        done += kUpdateBatch;
        if (is_end ? done >= listed : done + kUpdateBatch > listed) break;
        wait_at(kUpdaterThreads);
      }
      if (is_end) break;
      wait_at(kUpdaterThreads);
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
    wait_at(kUpdaterThreads);
    const uint32_t of_warp = lane < kUpdaterWarps ? s.found[lane] : 0;
    uint32_t at = listed + of_lanes + __reduce_add_sync(kFullMask, lane < warp ? of_warp : 0);
    listed += __reduce_add_sync(kFullMask, of_warp);
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      if (found.sets[order] == kNoSet) continue;
      s.updates.sets[at] = found.sets[order];
      s.updates.tags[at] = found.tags[order];
      s.updates.tokens[at++] = token.packed();
    }
    if (tile > 0) {
      wait_at(kUpdaterThreads);
    } else {
      wait_at(kAllThreads);
      if (s.sequential != 0) return;
    }
  }
  __syncwarp();
  entries = __reduce_add_sync(kFullMask, entries);
  evictions = __reduce_add_sync(kFullMask, evictions);
  if (lane == 0) {
    if (entries > 0) atomicAdd(&s.entries, entries);
    if (evictions > 0) atomicAdd(&s.evictions, evictions);
  }
  wait_at(kUpdaterThreads);
  if (i == 0) {
    count(v.header->entries, s.entries);
    count(v.header->evictions, s.evictions);
  }
}

}  // namespace specdec::ngram::insert
