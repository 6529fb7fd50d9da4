// ngram_insert on a GPU: planner threads, which find where rows go and write everything except the table.
#pragma once

#include "core/warp.cuh"
#include "ngram/append.h"
#include "ngram/insert/plan.cuh"

namespace specdec::ngram::insert {

// One row of the call, as planned.
struct Row {
  int64_t slot = -1;
  uint32_t count = 0, start = 0;
  uint32_t stream = 0, scope = 0, block = kNgramNone;  // of its record
  uint32_t id = 0, owner = 0;                          // of the block at its last block's index
  bool has_stream = true;
  bool refused = false;
};

// Loads for planning a row. All are unconditional, so that no load waits for a condition.
struct RowReads {
  int64_t slot, given;
  int32_t match_len;
  uint4 first, second;  // 16 bytes each of the slot's record

  __device__ __forceinline__ void load(const NgramInsertParams& p, NgramWork* work, int64_t b) {
    slot = slot_of_row(p, b);
    given = p.lengths ? p.lengths[b] : p.width;
    match_len = p.match_len ? p.match_len[b] : 0;
    const NgramSlot& record = stream_of(p, work, slot < 0 ? 0 : slot);
    static_assert(offsetof(NgramSlot, live) == 8 && offsetof(NgramSlot, length) == 12);
    static_assert(offsetof(NgramSlot, stream) == 16 && offsetof(NgramSlot, block) == 20 &&
                  offsetof(NgramSlot, scope) == 24);
    first = reinterpret_cast<const uint4&>(record);
    second = reinterpret_cast<const uint4&>(record.stream);
  }
};

__device__ __forceinline__ Row find_row(const NgramInsertParams& p, const RowReads& reads) {
  const NgramView& v = p.index;
  const auto& [slot, given, match_len, first, second] = reads;
  Row row;
  row.slot = slot;
  const bool fresh = p.is_document && p.is_first;
  const bool live = p.is_document || first.z != 0;
  const int64_t length = live && !fresh ? first.w : 0;
  row.stream = fresh ? 0 : second.x;
  row.scope = fresh ? p.group : second.z;
  row.block = live && !fresh ? second.y : kNgramNone;
  const uint32_t index = row.block & ((1u << v.block_bits) - 1);
  const uint2 head = reinterpret_cast<const uint2&>(v.blocks[index < v.num_blocks ? index : 0]);
  row.id = head.x;  // another block's, if that one is gone
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

__device__ __forceinline__ void count_accepted(const NgramInsertParams& p, int64_t b, uint32_t tokens) {
  if (p.match_len == nullptr || tokens == 0) return;
  count(p.index.header->rounds_by_match[p.match_len[b]], 1);
  count(p.index.header->accepted_by_match[p.match_len[b]], tokens - 1);
}

// Append the rows sequentially with one thread.
__device__ __noinline__ void append_sequentially(const NgramInsertParams& p, NgramWork* work, const Plan& s) {
  const NgramView& v = p.index;
  for (int64_t b = 0; b < p.rows; ++b) {
    const uint32_t tokens = s.added[b];
    if (tokens == 0) continue;
    NgramSlot& stream = stream_of(p, work, s.slot[b]);
    if (p.is_document && p.is_first) {
      stream = ngram_empty_stream(0, p.group);
    } else if (!p.is_document) {
      ngram_running_stream(v, s.slot[b]);
      if (int64_t{stream.length} + tokens > p.max_len) {  // a repeated slot
        ++v.header->refused;
        continue;
      }
    }
    ngram_append<1>(v, row_tokens(p, b, tokens), tokens, stream);
    count_accepted(p, b, tokens);
  }
}

// Return how many allocations remain until this block is reused.
__device__ __forceinline__ uint32_t distance(const NgramView& v, uint32_t next, uint32_t id) {
  const uint32_t mask = (1u << v.block_bits) - 1, from = next & mask, to = id & mask;
  return to >= from ? to - from : to + v.num_blocks - from;
}

// Write the n-th block that the call allocates, with one warp. Return the number of tokens it overwrote.
__device__ __forceinline__ int write_block(const NgramInsertParams& p, const Plan& s, uint32_t n) {
  constexpr int kHead = kWarp - kNgramBlockTokens;
  static_assert(sizeof(NgramBlock) == kWarp * 4 && offsetof(NgramBlock, tokens) == kHead * 4);
  const NgramView& v = p.index;
  const int lane = lane_id();
  const uint32_t id = ngram_id_after(v, s.next, n);
  auto* words = reinterpret_cast<int32_t*>(v.blocks + (id & ((1u << v.block_bits) - 1)));
  const int32_t before = words[lane];
  uint32_t b = 0;  // last row whose first block is not after n; rows without blocks are skipped
  for (uint32_t high = static_cast<uint32_t>(p.rows); high - b > 1;) {
    const uint32_t middle = (b + high) / 2;
    (s.first_block[middle] <= n ? b : high) = middle;
  }
  const uint32_t k = n - s.first_block[b], tokens = s.added[b], offset = s.start[b] % kNgramBlockTokens;
  const bool continues = s.continues[b],
             is_last = n + 1 == s.first_block[b] + (offset + tokens - 1) / kNgramBlockTokens + !continues;
  const int64_t token = int64_t{k + continues} * kNgramBlockTokens + lane - kHead - offset;
  int32_t word = lane >= kHead && token >= 0 && token < tokens ? row_tokens(p, b, tokens)[token] : -1;
  if (lane == 0) word = static_cast<int32_t>(id);
  if (lane == 1) word = static_cast<int32_t>(s.stream[b]);
  if (lane == 2) word = static_cast<int32_t>(s.scope[b]);
  if (lane == 3) word = static_cast<int32_t>(k == 0 ? s.last[b] : ngram_id_after(v, s.next, n - 1));
  if (lane == 4) word = static_cast<int32_t>(is_last ? kNgramNone : ngram_id_after(v, s.next, n + 1));
  words[lane] = word;
  const uint32_t overwritten = __ballot_sync(kFullMask, lane >= kHead && before >= 0);
  return s.allocated + n >= v.num_blocks ? __popc(overwritten) : 0;
}

// A row's tokens and allocated blocks are summed in one word: blocks, at most 1/27 of the tokens plus one per row, fit
// the remaining bits.
static_assert(kNgramMaxTokens < 1 << kTokenBits &&
              kNgramMaxTokens / kNgramBlockTokens + 2 * kNgramMaxRows < 1 << (32 - kTokenBits));

// Run a planner: find where its row goes, and write everything except the table.
template <bool kIsRound>
__device__ __forceinline__ void plan(const NgramInsertParams& p, const NgramInsertParams& given, Plan& s) {
  const NgramView& v = p.index;
  auto* const work = static_cast<NgramWork*>(p.work);
  const auto rows = static_cast<uint32_t>(p.rows), i = threadIdx.x - kUpdaters;
  const int lane = lane_id(), warp = warp_id() - kUpdaterWarps;
  RowReads reads;
  if (i < rows) reads.load(p, work, i);
  const bool reads_header = i == kPlanners - 1;
  const uint64_t allocated = reads_header ? v.header->blocks_allocated : 0;
  const uint32_t next = reads_header ? v.header->next_block : 0;
  for (uint32_t claim = i; claim < kClaims; claim += kPlanners) s.claimed[claim] = kNgramNone;
  if (i == 0) s.entries = s.evictions = s.sequential = 0;
  Row row;
  if (i < rows) row = find_row(p, reads);
  if (reads_header) {
    s.next = allocated > 0 ? next : 1u << v.block_bits;  // ngram_next_id
    s.allocated = allocated;
  }
  s.slot[i] = static_cast<uint32_t>(row.slot);
  s.given[i] = row.count;
  s.start[i] = row.start;
  s.stream[i] = row.stream;
  s.scope[i] = row.scope;
  wait_at(kAllThreads);

  const uint32_t first_block = blockIdx.x + warp * gridDim.x;
  if (lane == 0 && first_block < rows && first_block < v.num_blocks)  // likely
    prefetch(v.blocks + (ngram_id_after(v, s.next, first_block) & ((1u << v.block_bits) - 1)));
  bool depends = row.count > 0 && !row.has_stream;
  const auto slot = static_cast<uint32_t>(row.slot);
#pragma unroll 1
  for (uint32_t claim = slot, old = 0; row.count > 0 && old != kNgramNone && !depends; ++claim) {
    old = atomicCAS(&s.claimed[claim % kClaims], kNgramNone, slot);
    depends = old == slot;  // another row has the slot, too
  }
  if (i < rows && (s.first_bad[i] < row.count || (p.lengths == nullptr && s.first_bad[i] == 0))) {
    row.refused = true;
    row.count = 0;
  }
  const uint32_t last = row.id == row.block && row.owner == row.stream ? row.block : kNgramNone;
  const uint32_t offset = row.start % kNgramBlockTokens;
  const bool continues = last != kNgramNone && offset != 0;
  const uint32_t needed = row.count == 0 ? 0 : (offset + row.count - 1) / kNgramBlockTokens + !continues;
  s.added[i] = row.count;
  s.last[i] = last;
  s.continues[i] = continues;
  __syncwarp();
  uint32_t sum = sum_up_to_lane(needed << kTokenBits | row.count), total = 0;
  if (lane == kWarp - 1) s.sums[warp] = sum;
  wait_at(kPlannerThreads);
  // All inputs of the plan have wait_for_copies. The last block resets the counter to 0. (atomicAdd would aggregate
  // over the warp, and wait to return results.)
  const uint32_t others = i == 0 && gridDim.x > 1 ? atomicInc(&work->planned, gridDim.x - 1) : 0;
#pragma unroll
  for (int w = 0; w < kPlannerWarps; ++w) {
    sum += w < warp ? s.sums[w] : 0;
    total += s.sums[w];
  }
  const uint32_t blocks = total >> kTokenBits, tokens = total % (1u << kTokenBits), mine = (sum >> kTokenBits) - needed;
  s.first_block[i] = mine;
  depends |= row.count > 0 && last != kNgramNone && distance(v, s.next, last) < blocks;
  if (depends || blocks > v.num_blocks) atomicOr(&s.sequential, 1);
  wait_at(kAllThreads);

  const bool sequential = s.sequential != 0;
  if (!sequential) {
    // Write the tokens that go into existing blocks.
    const uint32_t most = kIsRound ? s.all_tokens : min(s.added[0], kNgramBlockTokens);
    for (uint32_t t = blockIdx.x * kPlanners + i; t < most; t += kPlanners * gridDim.x) {
      const auto [b, j] = find_token<kIsRound>(s, t);
      const uint32_t at = s.start[b] % kNgramBlockTokens + j;
      if (j >= s.added[b] || !s.continues[b] || at >= kNgramBlockTokens) continue;
      v.blocks[s.last[b] & ((1u << v.block_bits) - 1)].tokens[at] = row_tokens(p, b, s.added[b])[j];
    }
    uint32_t gone = 0;
    for (uint32_t n = first_block; n < blocks; n += kPlannerWarps * gridDim.x) gone += write_block(p, s, n);
    if (lane == 0) count(v.header->held, -uint64_t{gone});
  }

  // The last block to finish its plan updates the plan's inputs.
  if (i == 0) s.is_last = others == gridDim.x - 1;
  wait_at(kPlannerThreads);
  if (!s.is_last) return;
  if (row.refused) count(v.header->refused, 1);
  if (sequential) {
    if (i == 0) append_sequentially(given, work, s);
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
      if (last != kNgramNone) v.blocks[last & ((1u << v.block_bits) - 1)].next = ngram_id_after(v, s.next, mine);
      stream.block = ngram_id_after(v, s.next, mine + needed - 1);
    }
    count_accepted(p, i, row.count);
  }
  constexpr uint32_t kParallel = 8;  // tokens of a row
  for (uint32_t t = i; t < rows * kParallel; t += kPlanners) {
    const uint32_t b = t / kParallel, added = s.added[b];
    for (uint32_t k = t % kParallel; k < added && k < kNgramMaxMatch; k += kParallel)
      stream_of(p, work, s.slot[b]).tail[(s.start[b] + added - 1 - k) % kNgramMaxMatch] =
          row_tokens(p, b, added)[added - 1 - k];
  }
  if (i == 0) {
    NgramHeader& header = *v.header;
    if (blocks > 0) {
      header.next_block = ngram_id_after(v, s.next, blocks);
      header.blocks_allocated = s.allocated + blocks;
    }
    count(header.inserted, tokens);
    count(header.held, tokens);
  }
}

}  // namespace specdec::ngram::insert
