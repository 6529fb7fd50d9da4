// Memory layout of the n-gram index: one block of bytes without pointers, identical on CPU and GPU.
//
// [header][sets][blocks][slots], each at a multiple of 256 bytes. All zeros is empty.
//
// Token store: a ring of blocks of 27 tokens. A stream (a running request, or a document) fills its own blocks, which
// are linked in both directions; a stream that needs room takes the ring's oldest block, whichever stream owns it, so
// text ages out in the order in which its blocks were allocated. A block's id counts the ring's turns, so a reference
// to an overwritten block is detected by its id: references are never cleaned up.
//
// Table: 8-way sets of entries. The hash of (scope, order n, last n tokens) selects the set and the tag; an entry holds
// the 15 most recent positions of the token that followed. An update reads and writes one set, and only its first 64
// bytes if the n-gram is new. Updates are ordered by (request, position, order n ascending), and the result of one
// depends only on its set, key and position: any stable sort by set gives the same bytes.
//
// Slots: the record of a stream: where its text goes, its last tokens, and the occurrence that its drafts follow.
//
// Scopes: every text belongs to one, stored in its blocks. 0 is global, 1 to 2^31 - 1 are groups, larger ones are
// private to a stream. Texts of different scopes share memory and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace specdec::ngram {

constexpr int kNgramOrders = 4;                          // n = 1, 2, 4, 8
constexpr int kNgramMaxOrder = 1 << (kNgramOrders - 1);  // the longest hashed n
constexpr int kNgramWays = 8;                            // entries per set (associativity)
constexpr int kNgramOlder = 14;                          // older positions of an entry, after the newest
constexpr int kNgramRecent = 1 + kNgramOlder;            // positions per entry
constexpr int kNgramScopes = 3;                          // scopes that a stream reads: private, its group's, global
constexpr int kNgramMaxOccurrences =
    1 + kNgramOrders * kNgramScopes * kNgramRecent;  // occurrences that a draft may check
constexpr int kNgramCandidates = 32;                 // per draft: a warp's lanes
constexpr int kNgramMaxMatch = 32;                   // longest match that is verified
constexpr int kNgramMaxWeightLog = 24;
constexpr uint32_t kNgramMaxStep =
    256;  // maximum tokens between two drafts of a stream if the second one continues the first
constexpr int kNgramBlockTokens = 27;
constexpr int kNgramOffsetBits = 5;  // position = block id << 5 | offset
constexpr uint32_t kNgramIdMask = (1u << (32 - kNgramOffsetBits)) - 1;
constexpr uint32_t kNgramNone = 0xffffffff;        // no block: no id is this large
constexpr uint32_t kNgramGlobalScope = 0;          // global scope
constexpr uint32_t kNgramPrivateScope = 1u << 31;  // | stream number: a stream's private scope

struct alignas(256) NgramHeader {
  uint32_t next_block;        // id of the next block to allocate
  uint32_t streams;           // number of the newest stream, below 2^31
  uint64_t blocks_allocated;  // ever allocated
  uint64_t inserted;          // tokens ever inserted
  uint64_t held;              // tokens not yet overwritten
  uint64_t entries;           // table entries in use
  uint64_t evictions;         // entries replaced by a new n-gram
  // Statistics: nothing depends on these, and `digest` excludes them.
  uint64_t drafts;                               // rows with a stream
  uint64_t matches;                              // rows with a candidate
  uint64_t drafted;                              // nodes without the roots
  uint64_t rounds_by_match[kNgramMaxMatch + 1];  // rows reported, by the match length of their draft
  uint64_t accepted_by_match[kNgramMaxMatch + 1];
  uint64_t refused;  // rows that a GPU ignored, since it cannot raise
};
static_assert(sizeof(NgramHeader) == 768);

struct alignas(256) NgramSet {
  uint32_t meta[kNgramWays];                // tag << 8 | count; count 0 = empty, saturates at 255
  uint32_t newest[kNgramWays];              // position
  uint32_t older[kNgramWays][kNgramOlder];  // newest first, min(count, 15) - 1 of them valid
};
static_assert(sizeof(NgramSet) == 512);

struct alignas(128) NgramBlock {
  uint32_t id;
  uint32_t owner;                     // stream number; 0: a document
  uint32_t scope;                     // scope of its text
  uint32_t prev, next;                // ids of the stream's neighboring blocks, or kNgramNone
  int32_t tokens[kNgramBlockTokens];  // -1 = not written
};
static_assert(sizeof(NgramBlock) == 128);

// The occurrence whose text matched a stream furthest when the stream had `length` tokens.
struct alignas(8) NgramFollowed {
  uint32_t position, length;
};

// A stream's record. An ended stream stays until its slot is reused, so that its request may resume it.
struct alignas(16) NgramSlot {
  uint64_t request;  // the caller's number + 1; 0: none
  uint32_t live;
  uint32_t length;               // tokens of the stream
  uint32_t stream;               // its number, > 0
  uint32_t block;                // id of the last written block
  uint32_t scope;                // scope of its own text
  uint32_t group;                // additional scope that it reads; 0: no group
  NgramFollowed followed[2];     // at the last two drafts of different lengths
  int32_t tail[kNgramMaxMatch];  // token p of the stream is at p % 32: the context, even if the ring has overwritten it
};
static_assert(sizeof(NgramSlot) == 176 && offsetof(NgramSlot, followed) % 16 == 0);

struct NgramSizes {
  uint32_t num_sets, num_blocks, num_slots;
  uint32_t block_bits;  // id = (turn of the ring << block_bits) | index

  SD_HD size_t sets_at() const { return sizeof(NgramHeader); }
  SD_HD size_t blocks_at() const { return sets_at() + num_sets * sizeof(NgramSet); }
  SD_HD size_t slots_at() const { return (blocks_at() + num_blocks * sizeof(NgramBlock) + 255) / 256 * 256; }
  SD_HD size_t bytes() const { return slots_at() + num_slots * sizeof(NgramSlot); }
};

// The parts of a block of memory.
struct NgramView : NgramSizes {
  NgramHeader* header;
  NgramSet* sets;      // [num_sets]
  NgramBlock* blocks;  // [num_blocks]
  NgramSlot* slots;    // [num_slots]
};

SD_HD NgramView ngram_view(const NgramSizes& sizes, void* memory) {
  auto* const bytes = static_cast<char*>(memory);
  return {sizes, reinterpret_cast<NgramHeader*>(bytes), reinterpret_cast<NgramSet*>(bytes + sizes.sets_at()),
          reinterpret_cast<NgramBlock*>(bytes + sizes.blocks_at()),
          reinterpret_cast<NgramSlot*>(bytes + sizes.slots_at())};
}

// The hash runs backwards from the newest token, so one chain passes through all four orders.
SD_HD uint64_t ngram_hash_seed(uint32_t scope) { return scope * 0xc2b2ae3d27d4eb4full; }

SD_HD uint64_t ngram_hash_step(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9e3779b97f4a7c15ull;
  return hash ^ (hash >> 32);
}

SD_HD uint64_t ngram_key(uint64_t hash, int order) {
  hash += static_cast<uint64_t>(order + 1) * 0xd6e8feb86659fd93ull;
  hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccdull;
  hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return hash ^ (hash >> 33);
}

SD_HD uint32_t ngram_set_of(const NgramView& v, uint64_t key) {
  return static_cast<uint32_t>(((key >> 32) * v.num_sets) >> 32);
}

// Return a key's tag, never 0, so that no key matches an empty entry.
SD_HD uint32_t ngram_tag(uint64_t key) {
  const uint32_t tag = static_cast<uint32_t>(key) << 8;
  return tag != 0 ? tag : 1u << 8;
}

// Return the entry with that tag, or -1. Comparing all entries is faster than stopping at the first match.
SD_HD int ngram_find(const NgramSet& set, uint32_t tag) {
  int way = -1;
  SD_UNROLL
  for (int w = kNgramWays - 1; w >= 0; --w) way = (set.meta[w] ^ tag) < 256 ? w : way;
  return way;
}

// Return a position's age relative to a position being written. Its distance and that of every position not yet
// overwritten are below two turns of the ring; of two positions the older has the larger age.
SD_HD uint32_t ngram_age(const NgramView& v, uint32_t position, uint32_t now) {
  return now + (1u << (v.block_bits + kNgramOffsetBits)) - position;
}

// Return the block with that id, or null if the ring has overwritten it.
SD_HD NgramBlock* ngram_block(const NgramView& v, uint32_t id) {
  const uint32_t index = id & ((1u << v.block_bits) - 1);
  return index < v.num_blocks && v.blocks[index].id == id ? v.blocks + index : nullptr;
}

// A position in the token store; block null: beyond an end.
struct NgramCursor {
  const NgramBlock* block;
  uint32_t offset;
};

SD_HD NgramCursor ngram_cursor(const NgramView& v, uint32_t position) {
  const uint32_t offset = position & ((1u << kNgramOffsetBits) - 1);
  return {offset < kNgramBlockTokens ? ngram_block(v, position >> kNgramOffsetBits) : nullptr, offset};
}

SD_HD int32_t ngram_token(const NgramCursor& c) { return c.block ? c.block->tokens[c.offset] : -1; }

// Advance one token. A link is valid only if both blocks agree, since ids repeat after many turns of the ring.
SD_HD void ngram_forward(const NgramView& v, NgramCursor& c) {
  if (++c.offset < kNgramBlockTokens) return;
  const uint32_t id = c.block->id;
  c = {ngram_block(v, c.block->next), 0};
  if (c.block && c.block->prev != id) c.block = nullptr;
}

SD_HD void ngram_backward(const NgramView& v, NgramCursor& c) {
  if (c.offset-- > 0) return;
  const uint32_t id = c.block->id;
  c = {ngram_block(v, c.block->prev), kNgramBlockTokens - 1};
  if (c.block && c.block->next != id) c.block = nullptr;
}

// Advance n tokens.
SD_HD void ngram_advance(const NgramView& v, NgramCursor& c, uint32_t n) {
  c.offset += n;
  while (c.block && c.offset >= kNgramBlockTokens) {
    const uint32_t left = c.offset - kNgramBlockTokens;
    c.offset = kNgramBlockTokens - 1;
    ngram_forward(v, c);
    c.offset = left;
  }
}

// Return the index of the occurrence that the last draft followed before the stream reached `length`: the newer one,
// unless a draft has run since. So all drafts at one length leave the same record, in any order.
SD_HD int ngram_followed(const NgramFollowed (&at)[2], uint32_t length) {
  return at[1].length != length && (at[0].length == length || at[1].length > at[0].length) ? 1 : 0;
}

// Return the position where that occurrence continues, or kNgramNone.
SD_HD uint32_t ngram_follow(const NgramView& v, const NgramFollowed& occurrence, uint32_t length) {
  const uint32_t step = length - occurrence.length;
  NgramCursor c = ngram_cursor(v, occurrence.position);
  if (step > kNgramMaxStep) return kNgramNone;
  if (c.block) ngram_advance(v, c, step);
  return c.block ? c.block->id << kNgramOffsetBits | c.offset : kNgramNone;
}

// Count the tokens before `c` that match the context, newest first.
SD_HD int ngram_match(const NgramView& v, NgramCursor c, const int32_t* context, int context_len) {
  int match = 0;
  while (match < context_len) {
    ngram_backward(v, c);
    if (!c.block || ngram_token(c) != context[match]) break;
    ++match;
  }
  return match;
}

// Weights of candidates in fixed point, so that sums are exact and equal on CPU and GPU.
struct NgramWeights {
  uint32_t own, group, global;     // in 1/16, at most 2^12
  uint32_t recency[kNgramRecent];  // weight of an n-gram's i-th newest occurrence, in 1/256

  // Return the weight of text in a block with this owner and scope, for a stream.
  SD_HD uint32_t of(uint32_t owner, uint32_t scope, uint32_t stream) const {
    if (owner == stream) return own;
    return scope == kNgramGlobalScope ? global : group;  // other streams' private scopes are never read
  }
};

// Return a candidate's weight, below 2^45, so that 32 of them sum up to less than 2^50.
SD_HD uint64_t ngram_weight(uint32_t scale, uint32_t recency, int match) {
  const int log = match < kNgramMaxWeightLog ? match : kNgramMaxWeightLog;
  return static_cast<uint64_t>(scale * recency) << log;
}

}  // namespace specdec::ngram
