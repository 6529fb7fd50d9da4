// The memory of the n-gram index, one layout for both devices.
//
// Token store: a ring of blocks of 28 tokens. A stream (a running request, or a document) fills its own blocks, linked
// both ways; a stream in need of room takes the ring's oldest block, whoever owns it, so text ages out in the order in
// which its blocks were taken. A block's id counts the ring's turns, so a reference to an overwritten block is known by
// its id: no reference is ever cleaned up.
//
// Table: sets of 8 entries. The hash of (order n, last n tokens) names the set and the tag; an entry holds the 7 most
// recent positions of the token that followed. An update reads and writes one set, and only its first 64 bytes when
// the n-gram is new. Updates happen in the order (call, token, order n ascending). All zero is empty.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace specdec {

constexpr int kNgramOrders = 4;                                     // n = 1, 2, 4, 8
constexpr int kNgramLongest = 1 << (kNgramOrders - 1);              // the longest hashed n
constexpr int kNgramWays = 8;                                       // entries of a set
constexpr int kNgramOlder = 6;                                      // positions of an entry behind the newest
constexpr int kNgramCandidates = kNgramOrders * (1 + kNgramOlder);  // at most one warp's lanes
constexpr int kNgramMaxMatch = 32;                                  // longest match that is verified
constexpr int kNgramMaxWeightLog = 24;
constexpr int kNgramOwnWeightLog = 2;  // the request's own text counts four times
constexpr int kNgramBlockTokens = 28;
constexpr int kNgramOffsetBits = 5;  // position = block id << 5 | offset
constexpr uint32_t kNgramIdMask = (1u << (32 - kNgramOffsetBits)) - 1;
constexpr uint32_t kNgramNone = 0xffffffff;  // no block: no id is that large

struct alignas(256) NgramSet {
  uint32_t meta[kNgramWays];                // tag << 8 | count; count 0 = empty, saturates at 255
  uint32_t newest[kNgramWays];              // position
  uint32_t older[kNgramWays][kNgramOlder];  // newest first, min(count, 7) - 1 of them valid
};
static_assert(sizeof(NgramSet) == 256);

struct alignas(128) NgramBlock {
  uint32_t id;
  uint32_t owner;                     // stream number, 0 = a document
  uint32_t prev, next;                // ids of the stream's neighbouring blocks, or kNgramNone
  int32_t tokens[kNgramBlockTokens];  // -1 = not written
};
static_assert(sizeof(NgramBlock) == 128);

struct NgramSlot {
  uint32_t length;  // tokens of the stream, 0 = no stream
  uint32_t stream;  // its number, > 0 while it lives
  uint32_t block;   // id of the block written last
  uint32_t unused;
  int32_t tail[kNgramMaxMatch];  // token p of the stream is at p % 32: the context, whatever the ring forgot
};

struct NgramView {
  NgramSet* sets;      // [num_sets]
  NgramBlock* blocks;  // [num_blocks]
  NgramSlot* slots;    // [num_slots]
  uint32_t num_sets, num_blocks, num_slots;
  uint32_t block_bits;  // id = turn of the ring << block_bits | index
};

// The hash runs backwards from the newest token, so one chain passes through all four orders.
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

SD_HD uint32_t ngram_tag(uint64_t key) { return static_cast<uint32_t>(key) << 8; }

SD_HD int ngram_find(const NgramSet& set, uint32_t tag) {
  for (int w = 0; w < kNgramWays; ++w)
    if ((set.meta[w] & 0xff) != 0 && (set.meta[w] & ~0xffu) == tag) return w;
  return -1;
}

SD_HD uint32_t ngram_weight(int match, bool own) {
  const int log = match < kNgramMaxWeightLog ? match : kNgramMaxWeightLog;
  return 1u << (log + (own ? kNgramOwnWeightLog : 0));
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
  return {ngram_block(v, position >> kNgramOffsetBits), position & ((1u << kNgramOffsetBits) - 1)};
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

}  // namespace specdec
