// ngram_insert on a GPU: the plan of a call in smem, shared by the planners and updaters of a block.
#pragma once

#include "core/cuda.cuh"
#include "core/slots.h"
#include "core/warp.cuh"
#include "ngram/ngram_insert.h"

namespace specdec::ngram::insert {

constexpr uint32_t kNoSet = 0xffffffff, kNoToken = 0xffffffff;
constexpr int kUpdaters = 512, kUpdaterWarps = kUpdaters / kWarp;            // threads that find and apply updates
constexpr int kPlanners = kNgramMaxRows, kPlannerWarps = kPlanners / kWarp;  // one thread per row, after the updaters
constexpr int kThreads = kUpdaters + kPlanners;
constexpr int kPerTile = kUpdaters * kNgramOrders;         // updates of one token per thread
constexpr uint32_t kUpdateBatch = kUpdaters / kNgramWays;  // updates that are applied together, if there are enough
constexpr int kMaxBlocks = 128;
constexpr int kUpdatesPerBlock = 64;            // to aim at if all rows are full
constexpr int kTailParts = kNgramMaxMatch / 4;  // 16 bytes each
constexpr uint32_t kClaims = 512;               // hash slots for the slots of all rows
constexpr uint32_t kFirstTokens = 8;            // per row, which a round rarely exceeds
constexpr int kTokenBits = 17;                  // bits of a token count
static_assert(kPlanners % kWarp == 0 && kUpdaterWarps <= kWarp && kClaims > kNgramMaxRows);

__device__ __forceinline__ void count(uint64_t& counter, uint64_t by) {
  if (by != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(by));
}

using specdec::prefetch;
__device__ __forceinline__ void prefetch(const NgramSet& set) {
#pragma unroll
  for (size_t line = 0; line < sizeof(NgramSet); line += 128) prefetch(reinterpret_cast<const char*>(&set) + line);
}

// Named barriers: of all threads, and of those with the same work.
enum Barrier { kAllThreads, kUpdaterThreads, kPlannerThreads };
__device__ __forceinline__ void wait_at(Barrier barrier) {
  const int threads = barrier == kUpdaterThreads ? kUpdaters : barrier == kPlannerThreads ? kPlanners : kThreads;
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}

// Start a copy of 4 bytes from global memory to smem, pending until wait_for_words().
__device__ __forceinline__ void copy_word_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void commit_words() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_words() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Start a copy of 16 bytes after all words, pending until wait_for_copies().
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

struct Updates {  // in order
  uint32_t sets[kUpdateBatch + kPerTile], tags[kUpdateBatch + kPerTile],
      tokens[kUpdateBatch + kPerTile];  // tokens: Token::packed()
};

struct Plan {  // by row b, in smem
  uint32_t slot[kNgramMaxRows], start[kNgramMaxRows], stream[kNgramMaxRows], scope[kNgramMaxRows];
  uint32_t given[kNgramMaxRows];      // its tokens
  uint32_t first_bad[kNgramMaxRows];  // index of the first token below 0
  uint32_t added[kNgramMaxRows];      // 0 if a token is invalid
  uint32_t last[kNgramMaxRows];       // id of the stream's last block, or kNgramNone
  uint32_t first_block[kNgramMaxRows];
  bool continues[kNgramMaxRows];                            // in its last block
  alignas(16) int32_t tail[kNgramMaxRows][kNgramMaxMatch];  // of its record
  uint32_t next;                                            // id of the ring's next block
  uint64_t allocated;
  uint32_t first_token[kNgramMaxRows], all_tokens;  // tokens before each row, and in all
  uint32_t sums[kPlannerWarps];                     // of the rows of a warp
  uint32_t found[kUpdaterWarps];                    // updates, per warp
  uint32_t entries, evictions;                      // by this block
  uint32_t sequential;                              // 1: one thread processes the rows sequentially
  bool is_last;                                     // whether this block is the last to finish its plan
  uint32_t claimed[kClaims];                        // open-addressing set of the rows' slots
  union {
    int32_t text[kNgramMaxRows][kFirstTokens];  // first tokens of each row, while the first updates are found
    Updates updates;
  };

  // Return the tokens that the updaters use while `added` is not known.
  __device__ uint32_t tokens_of(uint32_t b) const { return first_bad[b] < given[b] ? 0 : given[b]; }
};

__device__ __forceinline__ const int32_t* row_tokens(const NgramInsertParams& p, int64_t b, uint32_t count) {
  return p.tokens + b * p.width + (p.lengths == nullptr ? p.width - count : 0);  // skip what is stored already
}

__device__ __forceinline__ NgramSlot& stream_of(const NgramInsertParams& p, NgramWork* work, int64_t slot) {
  return p.is_document ? work->document : p.index.slots[slot];
}

__device__ __forceinline__ int64_t slot_of_row(const NgramInsertParams& p, int64_t b) {
  return p.is_document ? 0 : slot_of(p.slots, p.first_slot + b, p.index.num_slots);
}

// Token j of row b.
struct Token {
  uint32_t b, j;

  __device__ uint32_t packed() const { return b << kTokenBits | j; }
  __device__ static Token from_packed(uint32_t packed) { return {packed >> kTokenBits, packed % (1u << kTokenBits)}; }
};

// Find the i-th token of the call, if it exists.
template <bool kIsRound>
__device__ __forceinline__ Token find_token(const Plan& s, uint32_t i) {
  if constexpr (!kIsRound) return {0, i};
  uint32_t b = 0;  // the last non-empty row with at most i tokens before it
#pragma unroll
  for (uint32_t step = kNgramMaxRows / 2; step > 0; step /= 2) b += s.first_token[b + step] <= i ? step : 0;
  return {b, i - s.first_token[b]};
}

}  // namespace specdec::ngram::insert
