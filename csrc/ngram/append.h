// Writes to the index: streams, blocks and updates, sequentially. The CPU uses this, and a GPU when the rows of a call
// depend on each other.
#pragma once

#include "ngram/layout.h"

namespace specdec::ngram {

SD_HD NgramSlot ngram_empty_stream(uint32_t number, uint32_t scope) {
  return {.request = 0,
          .live = 0,
          .length = 0,
          .stream = number,
          .block = kNgramNone,
          .scope = scope,
          .group = kNgramGlobalScope,
          .followed = {{kNgramNone, 0}, {kNgramNone, 0}},
          .tail = {}};
}

SD_HD NgramSlot ngram_next_stream(const NgramView& v, uint32_t group, bool is_private) {
  uint32_t& number = v.header->streams;
  number = number % (kNgramPrivateScope - 1) + 1;  // 0 stands for documents
  NgramSlot stream = ngram_empty_stream(number, is_private ? kNgramPrivateScope | number : group);
  stream.live = 1;
  stream.group = group;
  return stream;
}

// Return a slot's stream, or start a new one in the global scope.
SD_HD NgramSlot& ngram_running_stream(const NgramView& v, int64_t slot) {
  NgramSlot& stream = v.slots[slot];
  if (!stream.live) stream = ngram_next_stream(v, kNgramGlobalScope, false);
  return stream;
}

// Return whether a request with that name (0: none), group and privacy resumes the stream in this slot.
SD_HD bool ngram_resumes(const NgramSlot& slot, uint64_t name, uint32_t group, bool is_private) {
  return name != 0 && slot.request == name && slot.group == group && (slot.scope >= kNgramPrivateScope) == is_private;
}

// Start a stream in a slot, or resume the one that ended in slot `ended` (-1: none). That slot gets the previous stream
// of this one, which may be resumed later, too.
SD_HD void ngram_begin(const NgramView& v, int64_t slot, int64_t ended, uint64_t name, uint32_t group,
                       bool is_private) {
  NgramSlot& stream = v.slots[slot];
  stream.live = 0;
  if (ended < 0) {
    stream = ngram_next_stream(v, group, is_private);
    stream.request = name;
    return;
  }
  const NgramSlot held = stream;
  stream = v.slots[ended];
  v.slots[ended] = held;
  stream.live = 1;
}

// Return the id of the n-th block after the one with that id; n is at most the number of blocks.
SD_HD uint32_t ngram_id_after(const NgramView& v, uint32_t id, uint32_t n) {
  uint32_t turn = id >> v.block_bits, index = (id & ((1u << v.block_bits) - 1)) + n;
  for (; index >= v.num_blocks; index -= v.num_blocks) ++turn;
  return (turn << v.block_bits | index) & kNgramIdMask;
}

// Return the id of the next block to allocate.
SD_HD uint32_t ngram_next_id(const NgramView& v) {
  return v.header->blocks_allocated > 0 ? v.header->next_block
                                        : 1u << v.block_bits;  // turn 1: a zeroed block has turn 0
}

// Return the stream's last written block, or null if the ring has overwritten it.
SD_HD NgramBlock* ngram_last_block(const NgramView& v, const NgramSlot& stream) {
  NgramBlock* last = ngram_block(v, stream.block);
  return last && last->owner == stream.stream ? last : nullptr;
}

SD_HD NgramBlock* ngram_allocate_block(const NgramView& v, NgramSlot& stream) {
  NgramHeader& header = *v.header;
  const uint32_t id = ngram_next_id(v);
  header.next_block = ngram_id_after(v, id, 1);
  NgramBlock& block = v.blocks[id & ((1u << v.block_bits) - 1)];
  const bool overwrites = header.blocks_allocated++ >= v.num_blocks;
  for (int32_t& token : block.tokens) {
    header.held -= overwrites && token >= 0;
    token = -1;
  }
  block.id = id;
  block.owner = stream.stream;
  block.scope = stream.scope;
  block.prev = block.next = kNgramNone;
  // After the overwrite, which may have hit the stream's own last block.
  if (NgramBlock* last = ngram_last_block(v, stream)) {
    block.prev = stream.block;
    last->next = id;
  }
  stream.block = id;
  return &block;
}

// Compute a token's keys, one per order, smallest first. before(n) is the n-th token before it.
template <class Before>
SD_HD void ngram_keys(uint32_t scope, const Before& before, uint64_t (&keys)[kNgramOrders]) {
  uint64_t hash = ngram_hash_seed(scope);
  int order = 0;
  SD_UNROLL
  for (int n = 1; n <= kNgramMaxOrder; ++n) {
    hash = ngram_hash_step(hash, before(n));
    if (n == 1 << order) {
      keys[order] = ngram_key(hash, order);
      ++order;
    }
  }
}

// Record a position. A known n-gram gets it as its newest; a new one takes the first empty entry of its set, else the
// entry whose newest position is oldest (the first of those).
SD_HD void ngram_update(const NgramView& v, NgramSet& set, uint32_t tag, uint32_t position, uint64_t& entries,
                        uint64_t& evictions) {
  if (const int way = ngram_find(set, tag); way >= 0) {
    uint32_t* older = set.older[way];
    SD_UNROLL
    for (int i = kNgramOlder - 1; i > 0; --i) older[i] = older[i - 1];
    older[0] = set.newest[way];
    set.newest[way] = position;
    if ((set.meta[way] & 0xff) < 0xff) ++set.meta[way];
    return;
  }
  int victim = 0;
  uint32_t oldest = 0;
  for (int w = 0; w < kNgramWays; ++w) {
    if ((set.meta[w] & 0xff) == 0) {
      victim = w;
      break;
    }
    const uint32_t age = ngram_age(v, set.newest[w], position);
    if (age > oldest) {
      oldest = age;
      victim = w;
    }
  }
  ++((set.meta[victim] & 0xff) == 0 ? entries : evictions);
  set.meta[victim] = tag | 1;
  set.newest[victim] = position;
}

SD_HD void ngram_prefetch(const void* address) {
#ifndef __CUDA_ARCH__
  __builtin_prefetch(address, 1);
#endif
}

// Prefetch a known n-gram's older positions, which lie in other cache lines than its tag.
SD_HD void ngram_prefetch_older(const NgramSet& set, uint32_t tag) {
  if (const int way = ngram_find(set, tag); way >= 0) {
    ngram_prefetch(set.older[way]);
    ngram_prefetch(set.older[way] + kNgramOlder - 1);
  }
}

// Append tokens to a stream. `window` receives the kNgramMaxOrder tokens before them, then them; `position` their
// positions.
SD_HD void ngram_write(const NgramView& v, const int32_t* tokens, int count, NgramSlot& s, int32_t* window,
                       uint32_t* position) {
  const uint32_t start = s.length;
  for (int j = 1; j <= kNgramMaxOrder; ++j) window[kNgramMaxOrder - j] = s.tail[(start - j) % kNgramMaxMatch];
  uint32_t offset = start % kNgramBlockTokens;
  NgramBlock* block = offset > 0 ? ngram_last_block(v, s) : nullptr;
  for (int i = 0; i < count; ++i) {
    if (block == nullptr) block = ngram_allocate_block(v, s);
    block->tokens[offset] = window[kNgramMaxOrder + i] = s.tail[(start + i) % kNgramMaxMatch] = tokens[i];
    position[i] = s.block << kNgramOffsetBits | offset;
    if (++offset == kNgramBlockTokens) {
      offset = 0;
      block = nullptr;
    }
  }
  s.length += count;
  v.header->inserted += count;
  v.header->held += count;
}

// Append the tokens and index each under the n-grams before it. A position enters the table when its token is known, so
// the end of a stream, which has no continuation, is never a candidate. kPiece tokens are hashed and prefetched
// together.
template <int kPiece>
SD_HD void ngram_append(const NgramView& v, const int32_t* tokens, int64_t count, NgramSlot& s) {
  int32_t window[kNgramMaxOrder + kPiece];
  uint32_t position[kPiece];
  uint64_t keys[kPiece][kNgramOrders];

  for (int64_t done = 0; done < count; done += kPiece) {
    const int piece = static_cast<int>(count - done < kPiece ? count - done : kPiece);
    const uint32_t start = s.length;
    ngram_write(v, tokens + done, piece, s, window, position);
    for (int i = 0; i < piece; ++i) {
      ngram_keys(s.scope, [&](int n) { return window[kNgramMaxOrder + i - n]; }, keys[i]);
      for (const uint64_t key : keys[i]) ngram_prefetch(v.sets + ngram_set_of(v, key));
    }
    for (int i = 0; i < piece; ++i)
      for (const uint64_t key : keys[i]) ngram_prefetch_older(v.sets[ngram_set_of(v, key)], ngram_tag(key));
    for (int i = 0; i < piece; ++i)
      for (int order = 0; order < kNgramOrders && start + i >= 1u << order; ++order) {
        const uint64_t key = keys[i][order];
        ngram_update(v, v.sets[ngram_set_of(v, key)], ngram_tag(key), position[i], v.header->entries,
                     v.header->evictions);
      }
  }
}

}  // namespace specdec::ngram
