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
// A round is latency, and less of memory (slot numbers, slot records, sets, of 0.4 us each, all that can be on its way
// together) than of instructions, of which code that runs once takes one in four to five cycles: so a round has a
// kernel of its own, without what it never is. In bulk every block hashes every token, and reads it from L2.
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
constexpr int kUpdatesPerBlock = 128;           // to aim at, if all rows are full
constexpr int kRowWarps = kNgramRows / kWarp;   // that plan a row a thread
constexpr int kTailParts = kNgramMaxMatch / 4;  // 16 bytes each
constexpr uint32_t kClaims = 2048;
static_assert(kThreads >= kNgramRows && kEnough == kThreads / kNgramWays && kNgramRows % kWarp == 0);

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

__device__ __forceinline__ void count(uint64_t& counter, uint64_t by) {
  if (by != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(by));
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void prefetch(const NgramSet& set) {
#pragma unroll
  for (size_t line = 0; line < sizeof(NgramSet); line += 128) prefetch(reinterpret_cast<const char*>(&set) + line);
}

// 16 bytes of global memory on their way to shared memory, until arrived().
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One row of the call, as it will be.
struct Row {
  int64_t slot = -1;
  uint32_t count = 0, start = 0;
  uint32_t stream = 0, scope = 0, block = kNgramNone;  // of its record
  uint32_t id = 0, owner = 0;                          // of what is in its last block's place
  bool has_stream = true;
  bool refused = false;
};

struct Updates {                                      // in order
  alignas(16) uint32_t sets[kEnough + kPerTile + 4];  // ends in four that are none
  uint32_t tags[kEnough + kPerTile], cells[kEnough + kPerTile];
};

struct Plan {  // of row b, in shared memory
  uint32_t slot[kNgramRows], count[kNgramRows], start[kNgramRows];
  uint32_t stream[kNgramRows], scope[kNgramRows];
  uint32_t first_bad[kNgramRows];  // of its tokens, the first below 0
  uint32_t last[kNgramRows];       // id of the stream's last block, or kNgramNone
  uint32_t first_block[kNgramRows];
  bool goes_on[kNgramRows];                              // in its last block
  alignas(16) int32_t tail[kNgramRows][kNgramMaxMatch];  // of its record
  uint32_t widest;                                       // of the counts
  uint32_t next;                                         // id of the ring's next block
  uint64_t taken;
  uint32_t sums[kRowWarps];                  // of the rows of a warp
  uint32_t found[kWarps];                    // updates, by a warp
  uint32_t entries, evictions, overwritten;  // by this block
  union {
    uint32_t claimed[kClaims];  // first: by a row, of the slots with this number modulo kClaims
    Updates updates;
  };

  // How many tokens row b adds, before and after its first bad token was found.
  __device__ uint32_t tokens_of(uint32_t b) const { return first_bad[b] < count[b] ? 0 : count[b]; }
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

// Everything is read whether it is needed or not, so that nothing waits for a condition.
__device__ __forceinline__ Row find_row(const NgramInsertParams& p, NgramWork* work, int64_t b) {
  const NgramView& v = p.index;
  const int64_t given = p.lengths ? p.lengths[b] : p.width;
  const int32_t match_len = p.match_len ? p.match_len[b] : 0;
  Row row;
  row.slot = slot_of_row(p, b);
  const NgramSlot& record = stream_of(p, work, row.slot < 0 ? 0 : row.slot);
  static_assert(offsetof(NgramSlot, live) == 8 && offsetof(NgramSlot, length) == 12);
  static_assert(offsetof(NgramSlot, stream) == 16 && offsetof(NgramSlot, block) == 20 &&
                offsetof(NgramSlot, scope) == 24);
  const uint4 first = reinterpret_cast<const uint4&>(record), second = reinterpret_cast<const uint4&>(record.stream);
  const bool fresh = p.is_document && p.is_first;
  const bool live = p.is_document || first.z != 0;
  const int64_t length = live && !fresh ? first.w : 0;
  row.stream = fresh ? 0 : second.x;
  row.scope = fresh ? p.group : second.z;
  row.block = live && !fresh ? second.y : kNgramNone;
  const uint32_t index = row.block & ((1u << v.block_bits) - 1);
  const uint2 head = reinterpret_cast<const uint2&>(v.blocks[index < v.num_blocks ? index : 0]);
  row.id = head.x;  // another's, if there is no such block
  row.owner = head.y;
  const int64_t held = p.start < 0 ? 0 : length - p.start;  // of the text
  const int64_t skipped = held < given ? held : given, left = p.left > given ? p.left : given;
  const int64_t added = left - (held < left ? held : left);
  row.refused =
      row.slot >= 0 && (given < 0 || given > p.width || held < 0 || (!p.is_document && length + added > p.max_len) ||
                        match_len < 0 || match_len > kNgramMaxMatch);
  row.count = row.slot >= 0 && !row.refused ? static_cast<uint32_t>(given - skipped) : 0;
  row.start = static_cast<uint32_t>(length);
  row.has_stream = live;
  return row;
}

// Tokens that are checked together.
struct TokenBatch {
  static constexpr uint32_t kTokens = 4;
  int32_t token[kTokens];

  __device__ void load(const NgramInsertParams& p, uint32_t begin, uint32_t cells) {
#pragma unroll
    for (uint32_t k = 0; k < kTokens; ++k) {
      const uint32_t cell = begin + k * kThreads;
      token[k] = cell < cells ? p.tokens[cell] : 0;
    }
  }
  __device__ void check(const NgramInsertParams& p, uint32_t begin, Plan& s) const {
    uint32_t bad = 0;
#pragma unroll
    for (uint32_t k = 0; k < kTokens; ++k) bad |= static_cast<uint32_t>(token[k] < 0) << k;
#pragma unroll 1
    for (; bad != 0; bad &= bad - 1) {
      const uint32_t cell = begin + (__ffs(static_cast<int>(bad)) - 1) * kThreads;
      const auto width = static_cast<uint32_t>(p.width);
      atomicMin(&s.first_bad[cell / width], p.lengths == nullptr ? 0 : cell % width);
    }
  }
};

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

// The n-th block that the call takes, by a warp. Returns how many tokens it overwrote.
__device__ __forceinline__ int write_block(const NgramInsertParams& p, const Plan& s, uint32_t n) {
  constexpr int kHead = kWarp - kNgramBlockTokens;
  static_assert(sizeof(NgramBlock) == kWarp * 4 && offsetof(NgramBlock, tokens) == kHead * 4);
  const NgramView& v = p.index;
  const int lane = lane_id();
  const uint32_t id = ngram_id_after(v, s.next, n);
  auto* words = reinterpret_cast<int32_t*>(v.blocks + (id & ((1u << v.block_bits) - 1)));
  const int32_t before = words[lane];
  uint32_t b = 0;  // the row: the last whose first block is not behind n, as those without any are left out
  for (uint32_t high = static_cast<uint32_t>(p.rows); high - b > 1;) {
    const uint32_t middle = (b + high) / 2;
    (s.first_block[middle] <= n ? b : high) = middle;
  }
  const uint32_t k = n - s.first_block[b], tokens = s.count[b], offset = s.start[b] % kNgramBlockTokens;
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
  const uint32_t overwritten = __ballot_sync(kFullMask, lane >= kHead && before >= 0);
  return s.taken + n >= v.num_blocks ? __popc(overwritten) : 0;
}

// A token of the call: the j-th of row b. In order, each row as wide as the widest, rounded up to a power of two.
struct Cells {
  uint32_t log_width, all;

  __device__ uint32_t row(uint32_t cell) const { return cell >> log_width; }
  __device__ uint32_t token(uint32_t cell) const { return cell & ((1u << log_width) - 1); }
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
    const int32_t* text = row_tokens(p, b, tokens);
    int32_t before[kNgramLongest];
#pragma unroll
    for (uint32_t i = 0; i < kNgramLongest; ++i) {
      const int32_t given = i < j ? text[j - 1 - i] : 0;
      const int32_t held = i < j ? 0 : s.tail[b][(start + j - 1 - i) % kNgramMaxMatch];
      before[i] = i < j ? given : held;
    }
    uint64_t keys[kNgramOrders];
    ngram_keys(s.scope[b], [&](int i) { return before[i - 1]; }, keys);
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      const uint32_t set = ngram_set_of(v, keys[order]);
      tags[order] = ngram_tag(keys[order]);
      if (start + j < 1u << order || (set & (gridDim.x - 1)) != blockIdx.x) continue;
      sets[order] = set;
      prefetch(v.sets[set]);
    }
  }

  // Of this lane and those before it, and of the warp.
  __device__ void count(uint32_t& before, uint32_t& all) const {
    before = all = 0;
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
    return any && __ffs(static_cast<int>(which)) - 1 == lane_id();
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

// Applies a list of n in order, eight lanes a set.
__device__ __forceinline__ void apply(const NgramInsertParams& p, const Plan& s, const Cells& cells, uint32_t n,
                                      uint32_t& entries, uint32_t& evictions) {
  const NgramView& v = p.index;
  const Updates& list = s.updates;
  const int lane = lane_id(), way = lane % kNgramWays;
  const uint32_t mask = 0xffu << (lane - way);
  for (uint32_t i = threadIdx.x / kNgramWays; i < n; i += kThreads / kNgramWays) {
    const uint32_t set = list.sets[i];
    SetLanes own{.mask = mask, .way = way, .meta = 0, .newest = 0, .older = {}};
    own.load(v.sets[set]);  // on its way while the list is looked through
    bool before = false, behind = false;
    for (uint32_t at = way * 4; at < n; at += 4 * kNgramWays) {
      const uint4 four = reinterpret_cast<const uint4&>(list.sets[at]);
      const bool same[4] = {four.x == set, four.y == set, four.z == set, four.w == set};
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        before |= same[c] && at + c < i;
        behind |= same[c] && at + c > i;
      }
    }
    if ((__ballot_sync(mask, before) & mask) != 0) continue;  // the lanes of the first of its set do it
    const bool alone = (__ballot_sync(mask, behind) & mask) == 0;
    for (uint32_t next = i; next < n;) {
      const uint32_t cell = list.cells[next];
      own.update(v, list.tags[next], position_of(p, s, cells.row(cell), cells.token(cell)), entries, evictions);
      if (alone) break;
      uint32_t at = (next + 1) / kNgramWays * kNgramWays, which = 0;
      for (; at < n; at += kNgramWays) {
        const uint32_t j = at + way;
        which = __ballot_sync(mask, j > next && j < n && list.sets[j] == set) >> (lane - way) & 0xff;
        if (which != 0) break;
      }
      next = which == 0 ? n : at + __ffs(static_cast<int>(which)) - 1;
    }
    own.store(v.sets[set]);
  }
}

template <bool kIsRound>
__global__ void __launch_bounds__(kThreads, 1) ngram_insert_kernel(const __grid_constant__ NgramInsertParams given) {
  begin_kernel();
  NgramInsertParams p = given;
  if constexpr (kIsRound) {  // as insert_rows launches it: code that a round does not need is left out
    p.is_document = p.is_first = false;
    p.start = -1;
    p.left = 0;
  }
  __shared__ Plan s;
  const NgramView& v = p.index;
  auto* const work = static_cast<NgramWork*>(p.work);
  const auto i = threadIdx.x;
  const int lane = lane_id(), warp = warp_id();
  const auto rows = static_cast<uint32_t>(p.rows);
  if (i < rows) s.first_bad[i] = kNgramNone;
  if (i == 0) s.widest = s.entries = s.evictions = s.overwritten = 0;
  __syncthreads();

  // What is read before anything is known, all on its way together.
  const auto given_cells = static_cast<uint32_t>(p.rows * p.width);
  TokenBatch batch;
  batch.load(p, i, given_cells);
  constexpr uint32_t kTurns = kNgramRows * kTailParts / kThreads;
  int64_t slots[kTurns];
#pragma unroll
  for (uint32_t turn = 0; turn < kTurns; ++turn) {
    const uint32_t b = (turn * kThreads + i) / kTailParts;
    slots[turn] = b < rows ? slot_of_row(p, b) : -1;
  }
#pragma unroll
  for (uint32_t turn = 0; turn < kTurns; ++turn) {
    const uint32_t b = (turn * kThreads + i) / kTailParts, at = i % kTailParts * 4;
    if (slots[turn] >= 0) copy_ahead(&s.tail[b][at], &stream_of(p, work, slots[turn]).tail[at]);
  }
  if (i == kThreads - 1) {
    const uint64_t taken = v.header->blocks_taken;
    const uint32_t next = v.header->next_block;
    s.next = taken > 0 ? next : 1u << v.block_bits;  // ngram_next_id
    s.taken = taken;
  }
  Row row;
  if (i < rows) {
    row = find_row(p, work, i);
    s.slot[i] = static_cast<uint32_t>(row.slot);
    s.count[i] = row.count;
    s.start[i] = row.start;
    s.stream[i] = row.stream;
    s.scope[i] = row.scope;
  }
  const uint32_t claim = static_cast<uint32_t>(row.slot) % kClaims;
  if (row.count > 0) atomicExch(&s.claimed[claim], i);
  if (warp < kRowWarps) {
    const uint32_t widest = __reduce_max_sync(kFullMask, row.count);
    if (lane == 0) atomicMax(&s.widest, widest);
  }
  batch.check(p, i, s);
#pragma unroll 1
  for (uint32_t begin = i + TokenBatch::kTokens * kThreads; begin < given_cells;
       begin += TokenBatch::kTokens * kThreads) {
    batch.load(p, begin, given_cells);
    batch.check(p, begin, s);
  }
  arrived();
  __syncthreads();

  // The last warps have the fewest updates, and take the first blocks.
  const uint32_t first_block = blockIdx.x + (kWarps - 1 - warp) * gridDim.x;
  if (lane == 0 && first_block < rows && first_block < v.num_blocks)  // as likely as not
    prefetch(v.blocks + (ngram_id_after(v, s.next, first_block) & ((1u << v.block_bits) - 1)));
  Cells cells{.log_width = 31, .all = s.tokens_of(0)};
  if constexpr (kIsRound) {
    cells.log_width = s.widest > 1 ? kWarp - __clz(static_cast<int>(s.widest - 1)) : 0;
    cells.all = rows << cells.log_width;
  }

  // The updates, tile after tile, while the plan is made.
  TokenUpdates updates;
  constexpr int kBits = 17;  // for tokens; blocks, fewer by 27 but for one a row, have the others
  static_assert(kNgramChunk < 1 << kBits && kNgramChunk / kNgramBlockTokens + 2 * kNgramRows < 1 << (32 - kBits));
  uint32_t last = kNgramNone, needed = 0, sum = 0, total = 0, others = 0;
  uint32_t entries = 0, evictions = 0, listed = 0;
  bool depends = false, in_turn = false;
  for (uint32_t tile = 0;; tile += kThreads) {
    updates.find(p, s, cells, tile + i);
    const bool is_end = tile > 0 && tile >= cells.all;
    if (listed > kEnough || is_end) {
      apply(p, s, cells, listed, entries, evictions);
      listed = 0;
    }
    if (is_end) break;

    uint32_t before, all;
    updates.count(before, all);
    if (lane == 0) s.found[warp] = all;
    if (tile == 0 && warp < kRowWarps) {
      depends = row.count > 0 && !row.has_stream;
      if (row.count > 0 && s.claimed[claim] != i)  // by another row: of this slot?
#pragma unroll 1
        for (uint32_t b = 0; b < rows; ++b) depends |= b != i && s.slot[b] == row.slot && s.count[b] > 0;
      if (i < rows && (s.first_bad[i] < row.count || (p.lengths == nullptr && s.first_bad[i] == 0))) {
        row.refused = true;
        row.count = 0;
      }
      if (row.count > 0) {
        if (row.id == row.block && row.owner == row.stream) last = row.block;
        const bool goes_on = last != kNgramNone && row.start % kNgramBlockTokens != 0;
        needed = (row.start % kNgramBlockTokens + row.count - 1) / kNgramBlockTokens + !goes_on;
        s.last[i] = last;
        s.goes_on[i] = goes_on;
      }
      sum = sum_up_to_lane(needed << kBits | row.count);
      if (lane == kWarp - 1) s.sums[warp] = sum;
    }
    __syncthreads();

    const uint32_t of_warp = lane < kWarps ? s.found[lane] : 0;
    uint32_t at = listed + before + __reduce_add_sync(kFullMask, lane < warp ? of_warp : 0);
    listed += __reduce_add_sync(kFullMask, of_warp);
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      if (updates.sets[order] == kNoSet) continue;
      s.updates.sets[at] = updates.sets[order];
      s.updates.tags[at] = updates.tags[order];
      s.updates.cells[at++] = tile + i;
    }
    if (i < 4) s.updates.sets[listed + i] = kNoSet;
    if (tile == 0) {
      total = 0;
      for (int w = 0; w < kRowWarps; ++w) {
        sum += w < warp ? s.sums[w] : 0;
        total += s.sums[w];
      }
      if (i == 0 && gridDim.x > 1) others = atomicAdd(&work->planned, 1);  // all that the plan reads has arrived
      const uint32_t blocks = total >> kBits;
      depends |= row.count > 0 && last != kNgramNone && distance(v, s.next, last) < blocks;
      depends |= blocks > v.num_blocks;
      if (i < rows) {
        s.count[i] = row.count;
        s.first_block[i] = (sum >> kBits) - needed;
      }
    }
    in_turn = __syncthreads_or(depends);
    if (in_turn) break;
  }

  entries = __reduce_add_sync(kFullMask, entries);
  evictions = __reduce_add_sync(kFullMask, evictions);
  const uint32_t blocks = total >> kBits, tokens = total % (1u << kBits);
  uint32_t gone = 0;
  for (uint32_t n = first_block; !in_turn && n < blocks; n += kWarps * gridDim.x) gone += write_block(p, s, n);
  // The tokens that go into blocks that are there already.
  const uint32_t most = kIsRound ? cells.all : min(cells.all, kNgramBlockTokens);
  for (uint32_t cell = (blockIdx.x + 1) * kThreads - 1 - i; !in_turn && cell < most; cell += kThreads * gridDim.x) {
    const uint32_t b = cells.row(cell), j = cells.token(cell), at = s.start[b] % kNgramBlockTokens + j;
    if (j >= s.count[b] || !s.goes_on[b] || at >= kNgramBlockTokens) continue;
    v.blocks[s.last[b] & ((1u << v.block_bits) - 1)].tokens[at] = row_tokens(p, b, s.count[b])[j];
  }
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
    if (i == 0) append_in_turn(given, work, s);
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
      const uint32_t first = s.first_block[i];
      if (last != kNgramNone) v.blocks[last & ((1u << v.block_bits) - 1)].next = ngram_id_after(v, s.next, first);
      stream.block = ngram_id_after(v, s.next, first + needed - 1);
    }
    count_accepted(p, i, row.count);
  }
  for (uint32_t t = i; t < rows * kNgramWays; t += kThreads) {
    const uint32_t b = t / kNgramWays, all = s.count[b];
    for (uint32_t k = t % kNgramWays; k < all && k < kNgramMaxMatch; k += kNgramWays)
      stream_of(p, work, s.slot[b]).tail[(s.start[b] + all - 1 - k) % kNgramMaxMatch] =
          row_tokens(p, b, all)[all - 1 - k];
  }
  if (i == 0) {
    NgramHeader& header = *v.header;
    if (blocks > 0) {
      header.next_block = ngram_id_after(v, s.next, blocks);
      header.blocks_taken = s.taken + blocks;
    }
    count(header.inserted, tokens);
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
  const LaunchShape shape{.grid = blocks, .threads = kThreads};
  if (p.lengths != nullptr)
    launch("ngram_insert", ngram_insert_kernel<true>, shape, stream, p);
  else
    launch("ngram_insert", ngram_insert_kernel<false>, shape, stream, p);
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
