// The memory of the n-gram index: one block of bytes, the same on both devices, without pointers.
//
// [header][sets][blocks][slots], each at a multiple of 256 bytes. All zero is empty.
//
// Token store: a ring of blocks of 27 tokens. A stream (a running request, or a document) fills its own blocks, linked
// both ways; a stream in need of room takes the ring's oldest block, whoever owns it, so text ages out in the order in
// which its blocks were taken. A block's id counts the ring's turns, so a reference to an overwritten block is known by
// its id: no reference is ever cleaned up.
//
// Table: sets of 8 entries. The hash of (scope, order n, last n tokens) names the set and the tag; an entry holds the
// 15 most recent positions of the token that followed. An update reads and writes one set, and only its first 64 bytes
// when the n-gram is new. Updates happen in the order (request order, position, order n ascending), and what one does
// depends on its set, its key and its position alone: sorted by set, stably, they give the same bytes.
//
// Slots: a stream's record: where its text goes, its last tokens, and which place its drafts follow.
//
// Scopes: every text belongs to one, which its blocks name. 0 is everybody's, 1 to 2^31 - 1 are groups, above that are
// streams of their own. Texts of different scopes share the memory and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

#ifdef __CUDA_ARCH__
#define SD_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define SD_UNROLL
#else
#define SD_UNROLL _Pragma("GCC unroll 8")
#endif

namespace specdec::ngram {

constexpr int kNgramOrders = 4;                         // n = 1, 2, 4, 8
constexpr int kNgramLongest = 1 << (kNgramOrders - 1);  // the longest hashed n
constexpr int kNgramWays = 8;                           // entries of a set
constexpr int kNgramOlder = 14;                         // positions of an entry behind the newest
constexpr int kNgramRecent = 1 + kNgramOlder;           // positions of an entry
constexpr int kNgramScopes = 3;                         // its own, its group's and everybody's: what a stream sees
constexpr int kNgramPlaces = 1 + kNgramOrders * kNgramScopes * kNgramRecent;  // that a draft may look at
constexpr int kNgramCandidates = 32;                                          // of a draft: a warp's lanes
constexpr int kNgramMaxMatch = 32;                                            // longest match that is verified
constexpr int kNgramMaxWeightLog = 24;
constexpr uint32_t kNgramMaxStep = 256;  // tokens between two drafts of a stream, for the second to go on
constexpr int kNgramBlockTokens = 27;
constexpr int kNgramOffsetBits = 5;  // position = block id << 5 | offset
constexpr uint32_t kNgramIdMask = (1u << (32 - kNgramOffsetBits)) - 1;
constexpr uint32_t kNgramNone = 0xffffffff;   // no block: no id is that large
constexpr uint32_t kNgramGlobal = 0;          // everybody's scope
constexpr uint32_t kNgramPrivate = 1u << 31;  // | stream number: a stream's own scope

struct alignas(256) NgramHeader {
  uint32_t next_block;    // id of the block that is taken next
  uint32_t streams;       // number of the last stream begun, below 2^31
  uint64_t blocks_taken;  // ever
  uint64_t inserted;      // tokens, ever
  uint64_t held;          // of them, not overwritten
  uint64_t entries;       // of the table, in use
  uint64_t evictions;     // entries that gave way to a new n-gram
  // What happened: nothing depends on these, and `digest` leaves them out.
  uint64_t drafts;                               // rows with a stream
  uint64_t matches;                              // of those, with a candidate
  uint64_t drafted;                              // nodes beyond the roots
  uint64_t rounds_by_match[kNgramMaxMatch + 1];  // rows reported, by the match length of their draft
  uint64_t accepted_by_match[kNgramMaxMatch + 1];
  uint64_t refused;  // rows left out by a GPU, which cannot raise
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
  uint32_t owner;                     // stream number, 0 = a document
  uint32_t scope;                     // of its text
  uint32_t prev, next;                // ids of the stream's neighbouring blocks, or kNgramNone
  int32_t tokens[kNgramBlockTokens];  // -1 = not written
};
static_assert(sizeof(NgramBlock) == 128);

// A place whose text agreed furthest with a stream when that had so many tokens.
struct alignas(8) NgramFollowed {
  uint32_t position, length;
};

// A stream that has ended stays until its slot is given away, so that its request may resume it.
struct alignas(16) NgramSlot {
  uint64_t request;  // the caller's number + 1, 0 = none
  uint32_t live;
  uint32_t length;               // tokens of the stream
  uint32_t stream;               // its number, > 0
  uint32_t block;                // id of the block written last
  uint32_t scope;                // where its text goes
  uint32_t group;                // what else it sees, 0 = no group
  NgramFollowed followed[2];     // at the last drafts of different lengths
  int32_t tail[kNgramMaxMatch];  // token p of the stream is at p % 32: the context, whatever the ring forgot
};
static_assert(sizeof(NgramSlot) == 176 && offsetof(NgramSlot, followed) % 16 == 0);

struct NgramSizes {
  uint32_t num_sets, num_blocks, num_slots;
  uint32_t block_bits;  // id = turn of the ring << block_bits | index

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

// Never 0, so that an empty entry has no key's tag.
SD_HD uint32_t ngram_tag(uint64_t key) {
  const uint32_t tag = static_cast<uint32_t>(key) << 8;
  return tag != 0 ? tag : 1u << 8;
}

// The entry of that tag, or -1. All are compared, which is quicker than to stop at the first.
SD_HD int ngram_find(const NgramSet& set, uint32_t tag) {
  int way = -1;
  SD_UNROLL
  for (int w = kNgramWays - 1; w >= 0; --w) way = (set.meta[w] ^ tag) < 256 ? w : way;
  return way;
}

// How old a position is beside one being written: its own distance and that of every position not overwritten are below
// two turns of the ring, and of two the older is the larger.
SD_HD uint32_t ngram_age(const NgramView& v, uint32_t position, uint32_t now) {
  return now + (1u << (v.block_bits + kNgramOffsetBits)) - position;
}

// The block of that id, or null when the ring has overwritten it.
SD_HD NgramBlock* ngram_block(const NgramView& v, uint32_t id) {
  const uint32_t index = id & ((1u << v.block_bits) - 1);
  return index < v.num_blocks && v.blocks[index].id == id ? v.blocks + index : nullptr;
}

// A place in the token store; block null = past an end.
struct NgramCursor {
  const NgramBlock* block;
  uint32_t offset;
};

SD_HD NgramCursor ngram_cursor(const NgramView& v, uint32_t position) {
  const uint32_t offset = position & ((1u << kNgramOffsetBits) - 1);
  return {offset < kNgramBlockTokens ? ngram_block(v, position >> kNgramOffsetBits) : nullptr, offset};
}

SD_HD int32_t ngram_token(const NgramCursor& c) { return c.block ? c.block->tokens[c.offset] : -1; }

// A link holds when both blocks say so: ids repeat after many turns of the ring.
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

// n tokens further on.
SD_HD void ngram_advance(const NgramView& v, NgramCursor& c, uint32_t n) {
  c.offset += n;
  while (c.block && c.offset >= kNgramBlockTokens) {
    const uint32_t left = c.offset - kNgramBlockTokens;
    c.offset = kNgramBlockTokens - 1;
    ngram_forward(v, c);
    c.offset = left;
  }
}

// The place that the last draft followed before the stream, of that length now, grew: its newer one, unless there was a
// draft since. So drafts of a length leave the same, in whatever order.
SD_HD int ngram_followed(const NgramFollowed (&at)[2], uint32_t length) {
  return at[1].length != length && (at[0].length == length || at[1].length > at[0].length) ? 1 : 0;
}

// Where that goes on, or kNgramNone.
SD_HD uint32_t ngram_follow(const NgramView& v, const NgramFollowed& place, uint32_t length) {
  const uint32_t step = length - place.length;
  NgramCursor c = ngram_cursor(v, place.position);
  if (step > kNgramMaxStep) return kNgramNone;
  if (c.block) ngram_advance(v, c, step);
  return c.block ? c.block->id << kNgramOffsetBits | c.offset : kNgramNone;
}

// How many tokens before `c` agree with the context, newest first.
SD_HD int ngram_match(const NgramView& v, NgramCursor c, const int32_t* context, int context_len) {
  int match = 0;
  while (match < context_len) {
    ngram_backward(v, c);
    if (!c.block || ngram_token(c) != context[match]) break;
    ++match;
  }
  return match;
}

// What a candidate counts, in fixed point, so that sums are exact and the same on both devices.
struct NgramWeights {
  uint32_t own, group, global;     // in 1/16, at most 2^12
  uint32_t recency[kNgramRecent];  // of the i-th newest place of an n-gram, in 1/256

  // Of text in a block with this owner and scope, to a stream.
  SD_HD uint32_t of(uint32_t owner, uint32_t scope, uint32_t stream) const {
    if (owner == stream) return own;
    return scope == kNgramGlobal ? global : group;  // another's own scope is never looked at
  }
};

// Below 2^45, so that 32 of them stay below 2^50.
SD_HD uint64_t ngram_weight(uint32_t scale, uint32_t recency, int match) {
  const int log = match < kNgramMaxWeightLog ? match : kNgramMaxWeightLog;
  return static_cast<uint64_t>(scale * recency) << log;
}

}  // namespace specdec::ngram
