// Two kernels add tokens to the index.
//
// ngram_append_kernel, one block: a thread a row finds where its tokens go, the blocks of the ring are given out by a
// prefix sum over the rows, then a thread a token writes it and its four updates, and a warp a block writes that. What
// a row finds when its turn comes does not depend on the rows before, with exceptions that are rare (a ring so small
// that the call overwrites what it continues, a slot named twice, tokens of a slot without a stream): then one thread
// does it all, as the CPU would.
//
// ngram_update_kernel, many blocks: each reads all updates and keeps those of its own sets, in order; eight lanes, one
// for each entry, then take a set into registers and apply its updates. So no update waits for another but in its own
// set, and the order is kept without a sort.
//
// A round is latency: slot numbers, slot records, last blocks, overwritten blocks; updates, sets. In bulk a token is 36
// bytes of updates written once and read by every block from L2, and about 400 of hashing instructions.
#include "core/cuda.cuh"
#include "core/slots.h"
#include "ngram/append.h"
#include "ngram/ngram_insert.h"

namespace specdec {
namespace {

constexpr uint32_t kNoSet = 0xffffffff;
constexpr int kAppendThreads = 1024;
constexpr int kUpdateThreads = 512;
constexpr int kMostUpdateBlocks = 128;
constexpr int kUpdatesPerBlock = 32;  // to aim at

// What the first kernel leaves to the second, token after token.
struct Updates {
  NgramWork* work;
  uint4* sets;          // [kNgramChunk], of each order; kNoSet: none
  uint4* tags;          // [kNgramChunk]
  uint32_t* positions;  // [kNgramChunk]
};

__device__ __forceinline__ Updates updates_of(void* memory) {
  auto* work = static_cast<NgramWork*>(memory);
  auto* sets = reinterpret_cast<uint4*>(work + 1);
  return {work, sets, sets + kNgramChunk, reinterpret_cast<uint32_t*>(sets + 2 * kNgramChunk)};
}

__device__ __forceinline__ void count(uint64_t& counter, uint64_t by) {
  if (by != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(by));
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Sums of all threads before this one, and of all.
template <class T>
struct Prefix {
  T before, total;
};
template <int kThreads, class T>
__device__ __forceinline__ Prefix<T> prefix_sum(T value, T (&sums)[kThreads / kWarp + 1]) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto up_to = [&](T sum) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const T below = __shfl_up_sync(kFullMask, sum, step);
      sum += lane >= step ? below : 0;
    }
    return sum;
  };
  const T sum = up_to(value);
  if (lane == kWarp - 1) sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const T of_warp = lane < kWarps ? sums[lane] : 0, with = up_to(of_warp);
    if (lane < kWarps) sums[lane] = with - of_warp;
    if (lane == kWarp - 1) sums[kWarps] = with;
  }
  __syncthreads();
  return {sums[warp] + sum - value, sums[kWarps]};
}

// One row of the call, as it will be.
struct Row {
  NgramSlot* stream;
  uint32_t count, start;
  uint32_t last;  // id of the stream's last block, or kNgramNone
  bool goes_on;   // in that block
  bool has_stream;
  bool refused;

  // Blocks it needs.
  __device__ uint32_t blocks() const {
    if (count == 0) return 0;
    return (start % kNgramBlockTokens + count - 1) / kNgramBlockTokens + !goes_on;
  }
};

constexpr uint32_t kClaims = 2048;

struct Rows {  // of row b, in shared memory
  NgramSlot* stream[kNgramRows];
  uint32_t count[kNgramRows], start[kNgramRows], last[kNgramRows];
  uint32_t first_token[kNgramRows], first_block[kNgramRows];
  int32_t bad[kNgramRows];
  bool goes_on[kNgramRows];
  uint32_t claimed[kClaims];  // by a row, of the slots with this number modulo kClaims
};

__device__ __forceinline__ const int32_t* row_tokens(const NgramInsertParams& p, int64_t b, uint32_t count) {
  return p.tokens + b * p.width + (p.lengths == nullptr ? p.width - count : 0);  // what is held already is skipped
}

__device__ __forceinline__ Row find_row(const NgramInsertParams& p, NgramWork* work, int64_t b) {
  const NgramView& v = p.index;
  Row row{nullptr, 0, 0, kNgramNone, false, true, false};
  const int64_t slot = p.is_document ? 0 : slot_of(p.slots, p.first_slot + b, v.num_slots);
  if (slot < 0) return row;
  row.stream = p.is_document ? &work->document : v.slots + slot;
  prefetch(row.stream->tail + kNgramMaxMatch / 2);  // for the keys
  const bool fresh = p.is_document && p.is_first;
  const bool live = p.is_document || row.stream->live;
  const int64_t length = live && !fresh ? row.stream->length : 0;
  const int64_t given = p.lengths ? p.lengths[b] : p.width;
  const int64_t held = p.start < 0 ? 0 : length - p.start;  // of the text
  const int64_t skipped = held < given ? held : given, left = p.left > given ? p.left : given;
  const int64_t added = left - (held < left ? held : left);
  row.refused = given < 0 || given > p.width || held < 0 || (!p.is_document && length + added > p.max_len) ||
                (p.match_len && (p.match_len[b] < 0 || p.match_len[b] > kNgramMaxMatch));
  if (row.refused || given == skipped) return row;
  row.count = static_cast<uint32_t>(given - skipped);
  row.start = static_cast<uint32_t>(length);
  row.has_stream = live;
  if (live && !fresh) {
    const uint32_t last = row.stream->block;
    if (ngram_last_block(v, *row.stream) != nullptr) row.last = last;
    row.goes_on = row.last != kNgramNone && row.start % kNgramBlockTokens != 0;
  }
  return row;
}

__device__ __forceinline__ void count_accepted(const NgramInsertParams& p, int64_t b, uint32_t tokens) {
  if (p.match_len == nullptr || tokens == 0) return;
  count(p.index.header->rounds_by_match[p.match_len[b]], 1);
  count(p.index.header->accepted_by_match[p.match_len[b]], tokens - 1);
}

// By one thread, row after row.
__device__ __noinline__ void append_in_turn(const NgramInsertParams& p, const Rows& rows) {
  const NgramView& v = p.index;
  for (int64_t b = 0; b < p.rows; ++b) {
    const uint32_t tokens = rows.count[b];
    if (tokens == 0) continue;
    NgramSlot& stream = *rows.stream[b];
    if (p.is_document && p.is_first) {
      stream = ngram_empty_stream(0, p.group);
    } else if (!p.is_document) {
      ngram_running(v, rows.stream[b] - v.slots);
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

// The n-th block that the call takes, by a warp. Returns how many tokens it overwrote, to lane 0.
__device__ __forceinline__ int write_block(const NgramInsertParams& p, const Rows& rows, uint32_t next, uint64_t taken,
                                           uint32_t n) {
  constexpr int kHead = kWarp - kNgramBlockTokens;
  static_assert(sizeof(NgramBlock) == kWarp * 4 && offsetof(NgramBlock, tokens) == kHead * 4);
  const NgramView& v = p.index;
  const int lane = threadIdx.x % kWarp;
  const uint32_t id = ngram_id_after(v, next, n), b = row_of(rows.first_block, p.rows, n), k = n - rows.first_block[b];
  auto* words = reinterpret_cast<int32_t*>(v.blocks + (id & ((1u << v.block_bits) - 1)));
  const uint32_t overwritten = __ballot_sync(kFullMask, lane >= kHead && words[lane] >= 0);

  const uint32_t tokens = rows.count[b], offset = rows.start[b] % kNgramBlockTokens;
  const bool goes_on = rows.goes_on[b],
             is_last = n + 1 == rows.first_block[b] + (offset + tokens - 1) / kNgramBlockTokens + !goes_on;
  const int64_t token = int64_t{k + goes_on} * kNgramBlockTokens + lane - kHead - offset;
  const NgramSlot& stream = *rows.stream[b];
  const bool fresh = p.is_document && p.is_first;
  int32_t word = lane >= kHead && token >= 0 && token < tokens ? row_tokens(p, b, tokens)[token] : -1;
  if (lane == 0) word = static_cast<int32_t>(id);
  if (lane == 1) word = fresh ? 0 : static_cast<int32_t>(stream.stream);
  if (lane == 2) word = static_cast<int32_t>(fresh ? p.group : stream.scope);
  if (lane == 3) word = static_cast<int32_t>(k == 0 ? rows.last[b] : ngram_id_after(v, next, n - 1));
  if (lane == 4) word = static_cast<int32_t>(is_last ? kNgramNone : ngram_id_after(v, next, n + 1));
  words[lane] = word;
  return taken + n >= v.num_blocks ? __popc(overwritten) : 0;
}

__global__ void __launch_bounds__(kAppendThreads) ngram_append_kernel(NgramInsertParams p) {
  begin_kernel();
  __shared__ Rows rows;
  __shared__ uint64_t sums[kAppendThreads / kWarp + 1];
  __shared__ int overwritten;
  const NgramView& v = p.index;
  const Updates updates = updates_of(p.work);
  const auto i = static_cast<int32_t>(threadIdx.x);
  const int64_t cells = p.rows * p.width;
  const bool fresh = p.is_document && p.is_first;
  const uint32_t next = ngram_next_id(v);
  const uint64_t taken = v.header->blocks_taken;

  // What is read later and where it lies is known, or likely, is on its way at once.
  const int32_t first_token = i < cells ? p.tokens[i] : 0;
  const uint32_t likely = ngram_id_after(v, next, i / kWarp % v.num_blocks);
  if (i % kWarp == 0) prefetch(v.blocks + (likely & ((1u << v.block_bits) - 1)));
  if (i < p.rows) rows.bad[i] = false;
  if (i == 0) overwritten = 0;
  Row row{nullptr, 0, 0, kNgramNone, false, true, false};
  if (i < p.rows) {
    row = find_row(p, updates.work, i);
    rows.stream[i] = row.stream;
    rows.count[i] = row.count;
  }
  const auto claim = static_cast<uint32_t>(row.stream - v.slots) % kClaims;
  if (row.count > 0) atomicExch(&rows.claimed[claim], static_cast<uint32_t>(i));
  __syncthreads();
  for (int64_t cell = i; cell < cells; cell += kAppendThreads) {
    const auto b = static_cast<uint32_t>(cell) / static_cast<uint32_t>(p.width);
    const uint32_t j = static_cast<uint32_t>(cell) % static_cast<uint32_t>(p.width);
    const int32_t token = cell == i ? first_token : p.tokens[cell];
    if (token < 0 && (p.lengths == nullptr || j < rows.count[b])) atomicOr(&rows.bad[b], 1);
  }
  bool depends = !row.has_stream;
  if (row.count > 0 && rows.claimed[claim] != static_cast<uint32_t>(i))  // by another row: of this slot?
    for (int32_t b = 0; b < p.rows; ++b) depends |= b != i && rows.stream[b] == row.stream && rows.count[b] > 0;
  __syncthreads();
  if (i < p.rows && rows.bad[i]) {
    row.refused = true;
    row.count = 0;
  }
  if (row.refused) count(v.header->refused, 1);

  const Prefix<uint64_t> sum = prefix_sum<kAppendThreads>(static_cast<uint64_t>(row.blocks()) << 32 | row.count, sums);
  const auto blocks = static_cast<uint32_t>(sum.total >> 32), tokens = static_cast<uint32_t>(sum.total);
  depends = row.count > 0 && (depends || (row.last != kNgramNone && distance(v, next, row.last) < blocks));
  if (i < p.rows) {
    rows.count[i] = row.count;
    rows.start[i] = row.start;
    rows.last[i] = row.last;
    rows.goes_on[i] = row.goes_on;
    rows.first_token[i] = static_cast<uint32_t>(sum.before);
    rows.first_block[i] = static_cast<uint32_t>(sum.before >> 32);
  }
  if (__syncthreads_or(depends || blocks > v.num_blocks)) {
    if (i == 0) {
      append_in_turn(p, rows);
      updates.work->count = 0;
    }
    return;
  }

  for (uint32_t n = i; n < tokens; n += kAppendThreads) {
    const uint32_t b = row_of(rows.first_token, p.rows, n), j = n - rows.first_token[b];
    const int32_t* text = row_tokens(p, b, rows.count[b]);
    const NgramSlot& stream = *rows.stream[b];
    const uint32_t start = rows.start[b], at = start % kNgramBlockTokens + j;
    const uint32_t k = at / kNgramBlockTokens, offset = at % kNgramBlockTokens;
    const bool old = rows.goes_on[b] && k == 0;
    const uint32_t id = old ? rows.last[b] : ngram_id_after(v, next, rows.first_block[b] + k - rows.goes_on[b]);
    if (old) v.blocks[id & ((1u << v.block_bits) - 1)].tokens[offset] = text[j];

    uint64_t keys[kNgramOrders];
    ngram_keys(
        fresh ? p.group : stream.scope,
        [&](int n) {
          if (static_cast<int>(j) >= n) return text[static_cast<int>(j) - n];
          return start + j >= static_cast<uint32_t>(n) ? stream.tail[(start + j - n) % kNgramMaxMatch] : 0;
        },
        keys);
    uint32_t sets[kNgramOrders], tags[kNgramOrders];
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      sets[order] = start + j >= 1u << order ? ngram_set_of(v, keys[order]) : kNoSet;
      tags[order] = ngram_tag(keys[order]);
    }
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order)
      if (sets[order] != kNoSet && tokens <= kAppendThreads) {  // of more, the next kernel's own loads go ahead
        const auto* set = reinterpret_cast<const char*>(v.sets + sets[order]);
#pragma unroll
        for (size_t line = 0; line < sizeof(NgramSet); line += 128) prefetch(set + line);
      }
    updates.sets[n] = {sets[0], sets[1], sets[2], sets[3]};
    updates.tags[n] = {tags[0], tags[1], tags[2], tags[3]};
    updates.positions[n] = id << kNgramOffsetBits | offset;
  }
  int gone = 0;
  constexpr uint32_t kWarps = kAppendThreads / kWarp;  // of which the last have the fewest tokens
  for (uint32_t n = kWarps - 1 - i / kWarp; n < blocks; n += kWarps) gone += write_block(p, rows, next, taken, n);
  if (i % kWarp == 0 && gone > 0) atomicAdd(&overwritten, gone);
  __syncthreads();

  // What the rows read is written last.
  if (row.count > 0) {
    NgramSlot& stream = *row.stream;
    if (fresh) {
      stream.stream = 0;
      stream.block = kNgramNone;
      stream.scope = p.group;
    }
    const uint32_t needed = row.blocks(), first = rows.first_block[i];
    stream.length = row.start + row.count;
    if (needed > 0) {
      if (row.last != kNgramNone) v.blocks[row.last & ((1u << v.block_bits) - 1)].next = ngram_id_after(v, next, first);
      stream.block = ngram_id_after(v, next, first + needed - 1);
    }
    count_accepted(p, i, row.count);
  }
  for (uint32_t n = i; n < tokens; n += kAppendThreads) {
    const uint32_t b = row_of(rows.first_token, p.rows, n), j = n - rows.first_token[b], all = rows.count[b];
    if (j + kNgramMaxMatch >= all)
      rows.stream[b]->tail[(rows.start[b] + j) % kNgramMaxMatch] = row_tokens(p, b, all)[j];
  }
  if (i == 0) {
    updates.work->count = tokens;
    NgramHeader& header = *v.header;
    if (blocks > 0) header.next_block = ngram_id_after(v, next, blocks);
    header.blocks_taken = taken + blocks;
    header.inserted += tokens;
    header.held += tokens - static_cast<uint64_t>(overwritten);
  }
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

constexpr int kPerTile = kUpdateThreads * kNgramOrders;
constexpr int kEnough = 256;  // updates that are applied together, if there are as many

struct UpdateList {
  uint32_t count;
  uint32_t sets[kEnough + kPerTile], tags[kEnough + kPerTile], positions[kEnough + kPerTile];
};

// Applies the list in order, eight lanes a set.
__device__ __forceinline__ void apply(const NgramView& v, const UpdateList& list, uint32_t& entries,
                                      uint32_t& evictions) {
  const int lane = threadIdx.x % kWarp, way = lane % kNgramWays;
  const uint32_t mask = 0xffu << (lane - way);
  const uint32_t n = list.count;
  for (uint32_t i = threadIdx.x / kNgramWays; i < n; i += kUpdateThreads / kNgramWays) {
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

__global__ void __launch_bounds__(kUpdateThreads) ngram_update_kernel(NgramInsertParams p) {
  begin_kernel();
  __shared__ UpdateList list;
  __shared__ uint32_t sums[kUpdateThreads / kWarp + 1];
  const Updates updates = updates_of(p.work);
  const uint32_t tokens = updates.work->count, i = threadIdx.x;
  uint32_t entries = 0, evictions = 0, listed = 0;

  for (uint32_t tile = 0; tile == 0 || tile < tokens; tile += kUpdateThreads) {
    uint32_t sets[kNgramOrders], tags[kNgramOrders], position, mine = 0;
    {  // read before it is known whether there are so many: the list has room for them
      const uint4 s = updates.sets[tile + i], t = updates.tags[tile + i];
      position = updates.positions[tile + i];
      sets[0] = s.x, sets[1] = s.y, sets[2] = s.z, sets[3] = s.w;
      tags[0] = t.x, tags[1] = t.y, tags[2] = t.z, tags[3] = t.w;
    }
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      const bool own = tile + i < tokens && sets[order] != kNoSet && (sets[order] & (gridDim.x - 1)) == blockIdx.x;
      mine |= static_cast<uint32_t>(own) << order;
    }
    const Prefix<uint32_t> sum = prefix_sum<kUpdateThreads>(static_cast<uint32_t>(__popc(mine)), sums);
    uint32_t at = listed + static_cast<uint32_t>(sum.before);
#pragma unroll
    for (int order = 0; order < kNgramOrders; ++order) {
      if (!(mine >> order & 1)) continue;
      list.sets[at] = sets[order];
      list.tags[at] = tags[order];
      list.positions[at++] = position;
    }
    listed += static_cast<uint32_t>(sum.total);
    if (i == 0) list.count = listed;
    __syncthreads();
    if (listed > kEnough || tile + kUpdateThreads >= tokens) {
      apply(p.index, list, entries, evictions);
      listed = 0;
      __syncthreads();
    }
  }
  entries = __reduce_add_sync(kFullMask, entries);
  evictions = __reduce_add_sync(kFullMask, evictions);
  if (i % kWarp == 0) {
    count(p.index.header->entries, entries);
    count(p.index.header->evictions, evictions);
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
  launch("ngram_insert", ngram_append_kernel, {.grid = 1, .threads = kAppendThreads}, stream, p);
  unsigned blocks = 1;
  while (blocks < kMostUpdateBlocks && 2 * blocks * kUpdatesPerBlock <= p.rows * p.width * kNgramOrders) blocks *= 2;
  launch("ngram_insert", ngram_update_kernel, {.grid = blocks, .threads = kUpdateThreads}, stream, p);
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
