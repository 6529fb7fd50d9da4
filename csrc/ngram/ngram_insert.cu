// One kernel adds tokens to the index, so that a round is one launch.
//
// Every block makes the same plan from the same reads: a thread a row finds where its tokens go, and the blocks of the
// ring are given out by prefix sums over the rows. Then a thread hashes a token, and each block keeps the updates of
// its own sets, in order; eight lanes, one for each entry, take a set into registers and apply its updates. So no
// update waits for another but in its own set, and the order is kept without a sort. The ring's blocks are shared out,
// as nobody reads those. What the plan reads, slots and header, the block writes that is the last to have its plan.
//
// What a row finds when its turn comes does not depend on the rows before, with exceptions that are rare (a ring so
// small that the call overwrites what it continues, a slot named twice, tokens of a slot without a stream): then one
// thread does it all, as the CPU would.
//
// A round is latency: slot numbers, slot records, last blocks and sets, the latter on their way together. In bulk every
// block hashes every token, about 400 instructions, and reads it from L2.
#include "core/cuda.cuh"
#include "core/slots.h"
#include "core/warp_scan.cuh"
#include "ngram/append.h"
#include "ngram/ngram_insert.h"

namespace specdec {
namespace {

constexpr uint32_t kNoSet = 0xffffffff;
constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kPerTile = kThreads * kNgramOrders;  // updates of as many tokens as there are threads
constexpr int kEnough = 64;                        // updates that are applied together, if there are as many
constexpr int kMostBlocks = 128;
constexpr int kUpdatesPerBlock = 128;  // to aim at, if all rows are full
static_assert(kThreads >= kNgramRows && kEnough == kThreads / kNgramWays);

__device__ __forceinline__ void count(uint64_t& counter, uint64_t by) {
  if (by != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(by));
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Sums of all threads before this one, and of all. Two calls have a barrier between them.
struct Prefix {
  uint32_t before, total;
};
__device__ __forceinline__ Prefix prefix_sum(uint32_t value, uint32_t (&sums)[kWarps]) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t sum = sum_up_to_lane(value);
  if (lane == kWarp - 1) sums[warp] = sum;
  __syncthreads();
  const uint32_t of_warp = lane < kWarps ? sums[lane] : 0, with = sum_up_to_lane(of_warp);
  return {__shfl_sync(kFullMask, with - of_warp, warp) + sum - value, __shfl_sync(kFullMask, with, kWarp - 1)};
}

// One row of the call, as it will be.
struct Row {
  int64_t slot = -1;
  uint32_t count = 0, start = 0;
  uint32_t stream = 0, scope = 0, block = kNgramNone;  // of its record
  uint32_t id = 0, owner = 0;                          // of what is in its last block's place
  bool has_stream = true;
  bool refused = false;
};

constexpr uint32_t kClaims = 2048;
constexpr int kTailParts = kNgramLongest / 4 + 1;  // 16 bytes each, wherever the tokens begin

struct Updates {
  uint32_t count;
  uint32_t sets[kEnough + kPerTile], tags[kEnough + kPerTile], positions[kEnough + kPerTile];
};

struct Plan {  // of row b, in shared memory
  uint32_t slot[kNgramRows], count[kNgramRows], start[kNgramRows];
  uint32_t stream[kNgramRows], scope[kNgramRows];
  uint32_t last[kNgramRows];  // id of the stream's last block, or kNgramNone
  uint32_t first_token[kNgramRows], first_block[kNgramRows];
  int4 tail[kTailParts][kNgramRows];  // of its record: the tokens before its own, and some more
  int32_t bad[kNgramRows];
  bool goes_on[kNgramRows];  // in its last block
  uint32_t next;             // id of the ring's next block
  uint64_t taken;
  uint32_t entries, evictions, overwritten;  // by this block

  // The n-th token before those of row b.
  __device__ int32_t before(uint32_t b, uint32_t n) const {
    const uint32_t at = start[b] - n, part = (at / 4 - (start[b] - kNgramLongest) / 4) % (kNgramMaxMatch / 4);
    return reinterpret_cast<const int32_t*>(&tail[part][b])[at % 4];
  }
  union {
    uint32_t claimed[kClaims];  // first: by a row, of the slots with this number modulo kClaims
    Updates updates;
  };
};

__device__ __forceinline__ const int32_t* row_tokens(const NgramInsertParams& p, int64_t b, uint32_t count) {
  return p.tokens + b * p.width + (p.lengths == nullptr ? p.width - count : 0);  // what is held already is skipped
}

__device__ __forceinline__ NgramSlot& stream_of(const NgramInsertParams& p, NgramWork* work, int64_t slot) {
  return p.is_document ? work->document : p.index.slots[slot];
}

// 16 bytes of memory, and those around on their way into the L2 cache.
__device__ __forceinline__ uint4 load_ahead(const void* address) {
  uint4 words;
  asm volatile("ld.global.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address)
               : "memory");
  return words;
}

// Row b, and the tokens before it.
__device__ __forceinline__ Row find_row(const NgramInsertParams& p, NgramWork* work, int64_t b, Plan& s) {
  const NgramView& v = p.index;
  Row row;
  row.slot = p.is_document ? 0 : slot_of(p.slots, p.first_slot + b, v.num_slots);
  if (row.slot < 0) return row;
  const NgramSlot& record = stream_of(p, work, row.slot);
  static_assert(offsetof(NgramSlot, live) == 8 && offsetof(NgramSlot, length) == 12);
  static_assert(offsetof(NgramSlot, stream) == 16 && offsetof(NgramSlot, block) == 20 &&
                offsetof(NgramSlot, scope) == 24);
  const uint4 first = load_ahead(&record), second = load_ahead(&record.stream);
  const bool fresh = p.is_document && p.is_first;
  const int64_t given = p.lengths ? p.lengths[b] : p.width;
  const int32_t match_len = p.match_len ? p.match_len[b] : 0;
  const bool live = p.is_document || first.z != 0;
  const int64_t length = live && !fresh ? first.w : 0;
  row.stream = fresh ? 0 : second.x;
  row.scope = fresh ? p.group : second.z;
  if (live && !fresh) row.block = second.y;
  if (const uint32_t index = row.block & ((1u << v.block_bits) - 1); index < v.num_blocks) {
    const uint2 head = reinterpret_cast<const uint2&>(v.blocks[index]);
    row.id = head.x;
    row.owner = head.y;
  }
  int4 tail[kTailParts];
#pragma unroll
  for (uint32_t part = 0; part < kTailParts; ++part)
    tail[part] = reinterpret_cast<const int4*>(
        record.tail)[((static_cast<uint32_t>(length) - kNgramLongest) / 4 + part) % (kNgramMaxMatch / 4)];
#pragma unroll
  for (int part = 0; part < kTailParts; ++part) s.tail[part][b] = tail[part];
  const int64_t held = p.start < 0 ? 0 : length - p.start;  // of the text
  const int64_t skipped = held < given ? held : given, left = p.left > given ? p.left : given;
  const int64_t added = left - (held < left ? held : left);
  row.refused = given < 0 || given > p.width || held < 0 || (!p.is_document && length + added > p.max_len) ||
                match_len < 0 || match_len > kNgramMaxMatch;
  if (row.refused || given == skipped) return row;
  row.count = static_cast<uint32_t>(given - skipped);
  row.start = static_cast<uint32_t>(length);
  row.has_stream = live;
  return row;
}

__device__ __forceinline__ void count_accepted(const NgramInsertParams& p, int64_t b, uint32_t tokens) {
  if (p.match_len == nullptr || tokens == 0) return;
  count(p.index.header->rounds_by_match[p.match_len[b]], 1);
  count(p.index.header->accepted_by_match[p.match_len[b]], tokens - 1);
}

// By one thread, row after row.
__device__ __noinline__ void append_in_turn(const NgramInsertParams& p, NgramWork* work, const Plan& s) {
  const NgramView& v = p.index;
  for (int64_t b = 0; b < p.rows; ++b) {
    const uint32_t tokens = s.count[b];
    if (tokens == 0) continue;
    NgramSlot& stream = stream_of(p, work, s.slot[b]);
    if (p.is_document && p.is_first) {
      stream = ngram_empty_stream(0, p.group);
    } else if (!p.is_document) {
      ngram_running(v, s.slot[b]);
      if (int64_t{stream.length} + tokens > p.max_len) {  // a slot named twice
        ++v.header->refused;
        continue;
      }
    }
    ngram_append<1>(v, row_tokens(p, b, tokens), tokens, stream);
    count_accepted(p, b, tokens);
  }
}

// How many turns of the ring's hand until this block is taken.
__device__ __forceinline__ uint32_t distance(const NgramView& v, uint32_t next, uint32_t id) {
  const uint32_t mask = (1u << v.block_bits) - 1, from = next & mask, to = id & mask;
  return to >= from ? to - from : to + v.num_blocks - from;
}

// The last row whose first one is not behind n: the row of the n-th block or token, if rows without any are left out.
__device__ __forceinline__ uint32_t row_of(const uint32_t (&first)[kNgramRows], int64_t num_rows, uint32_t n) {
  uint32_t low = 0, high = static_cast<uint32_t>(num_rows);
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (first[middle] <= n ? low : high) = middle;
  }
  return low;
}

// The n-th block that the call takes, by a warp. Returns how many tokens it overwrote.
__device__ __forceinline__ int write_block(const NgramInsertParams& p, const Plan& s, uint32_t n) {
  constexpr int kHead = kWarp - kNgramBlockTokens;
  static_assert(sizeof(NgramBlock) == kWarp * 4 && offsetof(NgramBlock, tokens) == kHead * 4);
  const NgramView& v = p.index;
  const int lane = threadIdx.x % kWarp;
  const uint32_t id = ngram_id_after(v, s.next, n), b = row_of(s.first_block, p.rows, n), k = n - s.first_block[b];
  auto* words = reinterpret_cast<int32_t*>(v.blocks + (id & ((1u << v.block_bits) - 1)));
  const uint32_t overwritten = __ballot_sync(kFullMask, lane >= kHead && words[lane] >= 0);

  const uint32_t tokens = s.count[b], offset = s.start[b] % kNgramBlockTokens;
  const bool goes_on = s.goes_on[b],
             is_last = n + 1 == s.first_block[b] + (offset + tokens - 1) / kNgramBlockTokens + !goes_on;
  const int64_t token = int64_t{k + goes_on} * kNgramBlockTokens + lane - kHead - offset;
  int32_t word = lane >= kHead && token >= 0 && token < tokens ? row_tokens(p, b, tokens)[token] : -1;
  if (lane == 0) word = static_cast<int32_t>(id);
  if (lane == 1) word = static_cast<int32_t>(s.stream[b]);
  if (lane == 2) word = static_cast<int32_t>(s.scope[b]);
  if (lane == 3) word = static_cast<int32_t>(k == 0 ? s.last[b] : ngram_id_after(v, s.next, n - 1));
  if (lane == 4) word = static_cast<int32_t>(is_last ? kNgramNone : ngram_id_after(v, s.next, n + 1));
  words[lane] = word;
  return s.taken + n >= v.num_blocks ? __popc(overwritten) : 0;
}

// What one token changes of the table. Of a block's own sets; of the others kNoSet.
struct TokenUpdates {
  uint32_t row, sets[kNgramOrders], tags[kNgramOrders];
  int own = 0;  // how many

  __device__ void find(const NgramInsertParams& p, const Plan& s, uint32_t n, uint32_t tokens) {
    own = 0;
#pragma unroll
    for (uint32_t& set : sets) set = kNoSet;
    if (n >= tokens) return;
    const NgramView& v = p.index;
    const uint32_t b = row = row_of(s.first_token, p.rows, n), start = s.start[b];
    const auto j = static_cast<int>(n - s.first_token[b]);
    const int32_t* text = row_tokens(p, b, s.count[b]);
    int32_t before[kNgramLongest];
#pragma unroll
    for (int i = 0; i < kNgramLongest; ++i) {
      const int32_t given = i < j ? text[j - 1 - i] : 0, held = i < j ? 0 : s.before(b, i - j + 1);
      before[i] = i < j ? given : held;
    }
    uint64_t keys[kNgramOrders];
    ngram_keys(s.scope[b], [&](int i) { return before[i - 1]; }, keys);
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      const uint32_t set = ngram_set_of(v, keys[order]);
      if (start + static_cast<uint32_t>(j) < 1u << order || (set & (gridDim.x - 1)) != blockIdx.x) continue;
      sets[order] = set;
      tags[order] = ngram_tag(keys[order]);
      ++own;
      const auto* at = reinterpret_cast<const char*>(v.sets + set);
#pragma unroll
      for (size_t line = 0; line < sizeof(NgramSet); line += 128) prefetch(at + line);
    }
  }
};

// Where the n-th token goes, which is row b's, and whether that block is there already.
__device__ __forceinline__ uint32_t position_of(const NgramInsertParams& p, const Plan& s, uint32_t b, uint32_t n,
                                                bool& is_old) {
  const uint32_t at = s.start[b] % kNgramBlockTokens + n - s.first_token[b], k = at / kNgramBlockTokens;
  is_old = s.goes_on[b] && k == 0;
  const uint32_t id = is_old ? s.last[b] : ngram_id_after(p.index, s.next, s.first_block[b] + k - s.goes_on[b]);
  return id << kNgramOffsetBits | at % kNgramBlockTokens;
}

// A set in the registers of eight lanes, one for each entry.
struct SetLanes {
  uint32_t mask;  // the lanes
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
  // Whether this is the first lane for which `is` holds; `any`: whether one is.
  __device__ bool is_first(bool is, bool& any) const {
    const uint32_t which = __ballot_sync(mask, is) & mask;
    any = which != 0;
    return any && __ffs(static_cast<int>(which)) - 1 == static_cast<int>(threadIdx.x) % kWarp;
  }

  // ngram_update (append.h).
  __device__ void update(const NgramView& v, uint32_t tag, uint32_t position, uint32_t& entries, uint32_t& evictions) {
    bool any;
    const bool hit = is_first((meta ^ tag) < 256, any);
    if (any) {
      if (!hit) return;
#pragma unroll
      for (int i = kNgramOlder - 1; i > 0; --i) older[i] = older[i - 1];
      older[0] = newest;
      newest = position;
      meta += (meta & 0xff) < 0xff;
      changed = true;
      return;
    }
    bool victim = is_first((meta & 0xff) == 0, any);
    if (any) {
      entries += victim;
    } else {
      const uint32_t age = ngram_age(v, newest, position);
      victim = is_first(age == __reduce_max_sync(mask, age), any);
      evictions += victim;
    }
    if (!victim) return;
    meta = tag | 1;
    newest = position;
    changed = true;
  }
};

// Applies the list in order, eight lanes a set.
__device__ __forceinline__ void apply(const NgramView& v, const Updates& list, uint32_t& entries, uint32_t& evictions) {
  const int lane = threadIdx.x % kWarp, way = lane % kNgramWays;
  const uint32_t mask = 0xffu << (lane - way);
  const uint32_t n = list.count;
  for (uint32_t i = threadIdx.x / kNgramWays; i < n; i += kThreads / kNgramWays) {
    const uint32_t set = list.sets[i];
    SetLanes own{.mask = mask, .way = way, .meta = 0, .newest = 0, .older = {}};
    own.load(v.sets[set]);  // on its way while the list is looked through
    bool is_first = true;   // of its set; else that one's lanes do it
    for (uint32_t at = 0; at < i && is_first; at += kNgramWays) {
      const uint32_t j = at + way;
      is_first = (__ballot_sync(mask, j < i && list.sets[j] == set) & mask) == 0;
    }
    if (!is_first) continue;
    for (uint32_t at = i / kNgramWays * kNgramWays; at < n; at += kNgramWays) {
      const uint32_t j = at + way;
      const bool mine = j >= i && j < n && list.sets[j] == set;
      uint32_t left = __ballot_sync(mask, mine) >> (lane - way) & 0xff;
      for (; left != 0; left &= left - 1) {
        const uint32_t next = at + __ffs(static_cast<int>(left)) - 1;
        own.update(v, list.tags[next], list.positions[next], entries, evictions);
      }
    }
    own.store(v.sets[set]);
  }
}

__global__ void __launch_bounds__(kThreads, 1) ngram_insert_kernel(NgramInsertParams p) {
  begin_kernel();
  __shared__ Plan s;
  __shared__ uint32_t sums[kWarps];
  const NgramView& v = p.index;
  auto* const work = static_cast<NgramWork*>(p.work);
  const auto i = static_cast<int32_t>(threadIdx.x);
  const int64_t cells = p.rows * p.width;
  const int lane = i % kWarp;

  // The plan.
  const int32_t first_token = i < cells ? p.tokens[i] : 0;
  Row row;
  if (i < p.rows) {
    row = find_row(p, work, i, s);
    s.slot[i] = static_cast<uint32_t>(row.slot);
    s.count[i] = row.count;
    s.start[i] = row.start;
    s.stream[i] = row.stream;
    s.scope[i] = row.scope;
    s.bad[i] = 0;
  }
  const uint32_t claim = static_cast<uint32_t>(row.slot) % kClaims;
  if (row.count > 0) atomicExch(&s.claimed[claim], static_cast<uint32_t>(i));
  if (i == kThreads - 1) {
    s.next = ngram_next_id(v);
    s.taken = v.header->blocks_taken;
    s.entries = s.evictions = s.overwritten = 0;
  }
  __syncthreads();
  // The last warps have the fewest updates, and take the first blocks.
  const uint32_t first_block = blockIdx.x + (kWarps - 1 - i / kWarp) * gridDim.x;
  if (lane == 0 && first_block < p.rows && first_block < v.num_blocks)  // as likely as not
    prefetch(v.blocks + (ngram_id_after(v, s.next, first_block) & ((1u << v.block_bits) - 1)));
  for (int64_t cell = i; cell < cells; cell += kThreads) {
    const auto b = static_cast<uint32_t>(cell) / static_cast<uint32_t>(p.width);
    const uint32_t j = static_cast<uint32_t>(cell) % static_cast<uint32_t>(p.width);
    const int32_t token = cell == i ? first_token : p.tokens[cell];
    if (token < 0 && (p.lengths == nullptr || j < s.count[b])) atomicOr(&s.bad[b], 1);
  }
  bool depends = row.count > 0 && !row.has_stream;
  if (row.count > 0 && s.claimed[claim] != static_cast<uint32_t>(i))  // by another row: of this slot?
    for (int32_t b = 0; b < p.rows; ++b) depends |= b != i && s.slot[b] == row.slot && s.count[b] > 0;
  __syncthreads();
  if (i < p.rows && s.bad[i] != 0) {
    row.refused = true;
    row.count = 0;
  }
  uint32_t needed = 0, last = kNgramNone;
  if (row.count > 0) {
    if (row.id == row.block && row.owner == row.stream) last = row.block;
    const bool goes_on = last != kNgramNone && row.start % kNgramBlockTokens != 0;
    needed = (row.start % kNgramBlockTokens + row.count - 1) / kNgramBlockTokens + !goes_on;
    s.last[i] = last;
    s.goes_on[i] = goes_on;
  }
  constexpr int kBits = 17;  // for tokens; blocks, fewer by 27 but for one a row, have the others
  static_assert(kNgramChunk < 1 << kBits && kNgramChunk / kNgramBlockTokens + 2 * kNgramRows < 1 << (32 - kBits));
  const Prefix sum = prefix_sum(needed << kBits | row.count, sums);
  const uint32_t tokens = sum.total % (1u << kBits), blocks = sum.total >> kBits, before = sum.before >> kBits;
  if (i < p.rows) {
    s.count[i] = row.count;
    s.first_token[i] = sum.before % (1u << kBits);
    s.first_block[i] = before;
  }
  depends = row.count > 0 && (depends || (last != kNgramNone && distance(v, s.next, last) < blocks));
  const bool in_turn = __syncthreads_or(depends || blocks > v.num_blocks);
  // All that the plan reads has arrived.
  const uint32_t others = i == 0 && gridDim.x > 1 ? atomicAdd(&work->planned, 1) : 0;

  // The updates, tile after tile, and the tokens that go into blocks that are there already.
  TokenUpdates found;
  found.find(p, s, i, in_turn ? 0 : tokens);
  uint32_t entries = 0, evictions = 0, listed = 0;
  for (uint32_t tile = 0; !in_turn && tile < tokens; tile += kThreads) {
    const uint32_t n = tile + i;
    const Prefix own = prefix_sum(static_cast<uint32_t>(found.own), sums);
    if (n < tokens) {
      bool is_old;
      const uint32_t b = found.row, position = position_of(p, s, b, n, is_old);
      uint32_t at = listed + own.before;
#pragma unroll
      for (int order = 0; order < kNgramOrders; ++order) {
        if (found.sets[order] == kNoSet) continue;
        s.updates.sets[at] = found.sets[order];
        s.updates.tags[at] = found.tags[order];
        s.updates.positions[at++] = position;
      }
      if (is_old && tile / kThreads % gridDim.x == blockIdx.x) {
        NgramBlock& block = v.blocks[s.last[b] & ((1u << v.block_bits) - 1)];
        block.tokens[position & ((1u << kNgramOffsetBits) - 1)] = row_tokens(p, b, s.count[b])[n - s.first_token[b]];
      }
    }
    listed += own.total;
    found.find(p, s, n + kThreads, tokens);
    if (i == 0) s.updates.count = listed;
    __syncthreads();
    if (listed > kEnough || tile + kThreads >= tokens) {
      apply(v, s.updates, entries, evictions);
      listed = 0;
      if (tile + kThreads < tokens) __syncthreads();
    }
  }
  entries = __reduce_add_sync(kFullMask, entries);
  evictions = __reduce_add_sync(kFullMask, evictions);
  uint32_t gone = 0;
  for (uint32_t n = first_block; !in_turn && n < blocks; n += kWarps * gridDim.x) gone += write_block(p, s, n);
  if (lane == 0) {
    if (entries > 0) atomicAdd(&s.entries, entries);
    if (evictions > 0) atomicAdd(&s.evictions, evictions);
    if (gone > 0) atomicAdd(&s.overwritten, gone);
  }

  // What plans are made from.
  const bool is_last = __syncthreads_or(i == 0 && others == gridDim.x - 1);
  if (i == 0) {
    count(v.header->entries, s.entries);
    count(v.header->evictions, s.evictions);
    count(v.header->held, -uint64_t{s.overwritten});
  }
  if (!is_last) return;
  if (i == 0) work->planned = 0;
  if (row.refused) count(v.header->refused, 1);
  if (in_turn) {
    if (i == 0) append_in_turn(p, work, s);
    return;
  }
  if (row.count > 0) {
    NgramSlot& stream = stream_of(p, work, row.slot);
    if (p.is_document && p.is_first) {
      stream.stream = 0;
      stream.block = kNgramNone;
      stream.scope = p.group;
    }
    stream.length = row.start + row.count;
    if (needed > 0) {
      if (last != kNgramNone) v.blocks[last & ((1u << v.block_bits) - 1)].next = ngram_id_after(v, s.next, before);
      stream.block = ngram_id_after(v, s.next, before + needed - 1);
    }
    count_accepted(p, i, row.count);
  }
  for (int64_t b = i / kWarp; b < p.rows; b += kWarps) {
    const uint32_t all = s.count[b];
    if (static_cast<uint32_t>(lane) < all)
      stream_of(p, work, s.slot[b]).tail[(s.start[b] + all - 1 - lane) % kNgramMaxMatch] =
          row_tokens(p, b, all)[all - 1 - lane];
  }
  if (i == 0) {
    NgramHeader& header = *v.header;
    if (blocks > 0) header.next_block = ngram_id_after(v, s.next, blocks);
    header.blocks_taken = s.taken + blocks;
    header.inserted += tokens;
    count(header.held, tokens);
  }
}

constexpr int kBeginThreads = 256;

__global__ void __launch_bounds__(kBeginThreads) ngram_begin_kernel(NgramBeginParams p) {
  begin_kernel();
  __shared__ unsigned ended;
  const NgramView& v = p.index;
  if (threadIdx.x == 0) ended = kNgramNone;
  __syncthreads();
  for (uint32_t slot = threadIdx.x; slot < v.num_slots && p.name != 0; slot += kBeginThreads) {
    const NgramSlot& held = v.slots[slot];
    if (ngram_resumes(held, p.name, p.group, p.is_private) && (!held.live || slot == p.slot)) atomicMin(&ended, slot);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    ngram_begin(v, p.slot, ended == kNgramNone ? -1 : int64_t{ended}, p.name, p.group, p.is_private);
}

}  // namespace

void ngram_insert_cuda(const NgramInsertParams& p, Stream stream) {
  unsigned blocks = 1;
  while (blocks < kMostBlocks && 2 * blocks * kUpdatesPerBlock <= p.rows * p.width * kNgramOrders) blocks *= 2;
  launch("ngram_insert", ngram_insert_kernel, {.grid = blocks, .threads = kThreads}, stream, p);
}

void ngram_begin_cuda(const NgramBeginParams& p, Stream stream) {
  launch("ngram_begin", ngram_begin_kernel, {.grid = 1, .threads = kBeginThreads}, stream, p);
}

void ngram_release_cuda(const NgramReleaseParams& p, Stream stream) {
  SD_CUDA_CHECK("ngram_release", cudaMemsetAsync(&p.index.slots[p.slot].live, 0, sizeof(uint32_t), stream));
}

void ngram_copy_cuda(void* to, const void* from, size_t bytes, bool wait, Stream stream) {
  SD_CUDA_CHECK("ngram_index", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  if (wait) SD_CUDA_CHECK("ngram_index", cudaStreamSynchronize(stream));
}

void ngram_zero_cuda(void* memory, size_t bytes, Stream stream) {
  SD_CUDA_CHECK("ngram_index", cudaMemsetAsync(memory, 0, bytes, stream));
}

}  // namespace specdec
