// What planners and updaters of a block share.
#pragma once

#include "core/cuda.cuh"
#include "core/slots.h"
#include "core/warp.cuh"
#include "ngram/ngram_insert.h"

namespace specdec::ngram::insert {

constexpr uint32_t kNoSet = 0xffffffff, kNoToken = 0xffffffff;
constexpr int kUpdaters = 512, kUpdaterWarps = kUpdaters / kWarp;         // threads that find and apply updates
constexpr int kPlanners = kNgramRows, kPlannerWarps = kPlanners / kWarp;  // behind them, one for each row
constexpr int kThreads = kUpdaters + kPlanners;
constexpr int kPerTile = kUpdaters * kNgramOrders;  // updates of as many tokens as there are threads
constexpr uint32_t kLot = kUpdaters / kNgramWays;   // updates that are applied together, if there are as many
constexpr int kMostBlocks = 128;
constexpr int kUpdatesPerBlock = 64;            // to aim at, if all rows are full
constexpr int kTailParts = kNgramMaxMatch / 4;  // 16 bytes each
constexpr uint32_t kClaims = 512;               // places for the slots of all rows
constexpr uint32_t kFirstTokens = 8;            // of a row, more than which a round seldom adds
constexpr int kTokenBits = 17;                  // of a number of tokens
static_assert(kPlanners % kWarp == 0 && kUpdaterWarps <= kWarp && kClaims > kNgramRows);

__device__ __forceinline__ void count(uint64_t& counter, uint64_t by) {
  if (by != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(by));
}

using specdec::prefetch;
__device__ __forceinline__ void prefetch(const NgramSet& set) {
#pragma unroll
  for (size_t line = 0; line < sizeof(NgramSet); line += 128) prefetch(reinterpret_cast<const char*>(&set) + line);
}

// Barriers of all threads, and of those with the same work.
enum Barrier { kAll, kOfUpdaters, kOfPlanners };
__device__ __forceinline__ void wait_at(Barrier barrier) {
  const int threads = barrier == kOfUpdaters ? kUpdaters : barrier == kOfPlanners ? kPlanners : kThreads;
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}

// 4 bytes of global memory on their way to shared memory, until words_arrived().
__device__ __forceinline__ void copy_word_ahead(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void words_on_their_way() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void words_arrived() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// 16 bytes, behind all words, until arrived().
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

struct Updates {                                                                   // in order
  uint32_t sets[kLot + kPerTile], tags[kLot + kPerTile], tokens[kLot + kPerTile];  // which: Token::name()
};

struct Plan {  // of row b, in shared memory
  uint32_t slot[kNgramRows], start[kNgramRows], stream[kNgramRows], scope[kNgramRows];
  uint32_t given[kNgramRows];      // its tokens
  uint32_t first_bad[kNgramRows];  // of those, the first below 0
  uint32_t added[kNgramRows];      // 0 if one is bad
  uint32_t last[kNgramRows];       // id of the stream's last block, or kNgramNone
  uint32_t first_block[kNgramRows];
  bool goes_on[kNgramRows];                              // in its last block
  alignas(16) int32_t tail[kNgramRows][kNgramMaxMatch];  // of its record
  uint32_t next;                                         // id of the ring's next block
  uint64_t taken;
  uint32_t first_token[kNgramRows], all_tokens;  // how many the rows before it have, and all
  uint32_t sums[kPlannerWarps];                  // of the rows of a warp
  uint32_t found[kUpdaterWarps];                 // updates, by a warp
  uint32_t entries, evictions;                   // by this block
  uint32_t in_turn;                              // 1: row after row, by one thread
  bool is_last;                                  // of the blocks, to have its plan
  uint32_t claimed[kClaims];                     // slots, each once, at or behind the place of its number
  union {
    int32_t text[kNgramRows][kFirstTokens];  // how rows begin, while the first updates are found
    Updates updates;
  };

  // What the updaters work with, while `added` is not known.
  __device__ uint32_t tokens_of(uint32_t b) const { return first_bad[b] < given[b] ? 0 : given[b]; }
};

__device__ __forceinline__ const int32_t* row_tokens(const NgramInsertParams& p, int64_t b, uint32_t count) {
  return p.tokens + b * p.width + (p.lengths == nullptr ? p.width - count : 0);  // what is held already is skipped
}

__device__ __forceinline__ NgramSlot& stream_of(const NgramInsertParams& p, NgramWork* work, int64_t slot) {
  return p.is_document ? work->document : p.index.slots[slot];
}

__device__ __forceinline__ int64_t slot_of_row(const NgramInsertParams& p, int64_t b) {
  return p.is_document ? 0 : slot_of(p.slots, p.first_slot + b, p.index.num_slots);
}

// A token of the call: the j-th of row b.
struct Token {
  uint32_t b, j;

  __device__ uint32_t name() const { return b << kTokenBits | j; }
  __device__ static Token named(uint32_t name) { return {name >> kTokenBits, name % (1u << kTokenBits)}; }
};

// The i-th token of the call, if there are so many.
template <bool kIsRound>
__device__ __forceinline__ Token find_token(const Plan& s, uint32_t i) {
  if constexpr (!kIsRound) return {0, i};
  uint32_t b = 0;  // the last row that has not more before it, which is not empty
#pragma unroll
  for (uint32_t step = kNgramRows / 2; step > 0; step /= 2) b += s.first_token[b + step] <= i ? step : 0;
  return {b, i - s.first_token[b]};
}

}  // namespace specdec::ngram::insert
