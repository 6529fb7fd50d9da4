// KvRing: the shared-memory pipeline that brings a worker's KV tiles from the paged pools to its consumer warps.
//
// A few producer warps fill the ring, because a single warp can start a copy only every 60 cycles. They walk the
// worker's segments (stream-K, or whole items), look up the pages of their tokens one tile ahead, and copy rows with
// cp.async, 16 bytes at a time: one code path serves every page size and any strides, and a row of one head (128 bytes
// or more) is whole sectors anyway. With many query rows (kTma), TMA copies boxes of 16 tokens instead, as long as
// these lie on one page and in the prefix or a chain, so that exponentials do not queue after copies. Two blocks that
// walk the same KV in step may form a cluster: each then issues half of the boxes, multicast to both, and the L2 is
// read once instead of twice. The other warps consume the tiles and release each stage when done with it. Producers and
// consumers synchronize only through mbarriers.
//
// Reads: page table, K and V pools, mask. Writes: shared memory, and status for invalid pages.
//
// In the kernels a "token" is a KV row, and a "row" is a query row times a head of its GQA group.
#pragma once

#include "attention/common/stream_k.cuh"
#include "attention/sm90/tensor_maps.h"
#include "core/cluster.cuh"
#include "core/cuda.cuh"
#include "core/mbarrier.cuh"

namespace specdec::attention {

// One pipeline stage: K and V of a tile, in panels of 128 bytes per token. Byte c of token j lies in panel c / 128 at
// 128 j + (c % 128 ^ (j % 8 * 16)).
//
// ldmatrix reads this 128-byte swizzle without bank conflicts, and wgmma reads it directly (K-major for K, MN-major for
// V). Tokens of 64 or 32 bytes are packed in one panel, with Hopper's 64- or 32-byte swizzle.
template <int kTokens, int kRowBytes>
struct Stage {
  static constexpr int kLine = kRowBytes < 128 ? kRowBytes : 128;  // bytes of a token in a panel
  static constexpr int kPanel = kTokens * kLine;
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes % 128 == 0);

  unsigned char k[kTokens * kRowBytes];
  unsigned char v[kTokens * kRowBytes];

  // Return where 16-byte piece `piece` of token `row` begins.
  __device__ static constexpr int offset(int row, int piece) {
    constexpr int kPieces = kLine / 16;
    return (piece / kPieces * kPanel + row * kLine + piece % kPieces * 16) ^ swizzle(row);
  }
  // Return the swizzle: the value that offsets within a token's line are XORed with.
  __device__ static constexpr int swizzle(int row) { return row / (128 / kLine) % (kLine / 16) * 16; }
};

// Warps 0 to kConsumers - 1 of the block consume, the next kProducers produce.
//
// K and V of a tile share their barriers, except in a ring that TMA fills where it can (kTma): there each has its own,
// so that scores do not wait for V, and the next K arrives while V is still being multiplied. If kDequantizers warps
// convert the tiles, those warps, not the consumers, read the stages, and the dequantized tiles come first in shared
// memory. kReaders warps read each stage, in each block of a cluster. Either all producers share every tile, or kTeams
// teams of them take turns at whole tiles.
template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_, int kProducers_, bool kTma_ = false,
          int kDequantizers_ = 0, int kReaders_ = (kDequantizers_ > 0 ? kDequantizers_ : kConsumers_), int kTeams_ = 1>
struct KvRing {
  static constexpr int kTokens = kTokens_, kRowBytes = kRowBytes_, kStages = kStages_;
  static constexpr int kConsumers = kConsumers_, kProducers = kProducers_;
  static constexpr bool kTma = kTma_, kSeparateKv = kTma_;
  static constexpr int kDequantizers = kDequantizers_, kReaders = kReaders_;
  // Distinct segments that the tiles in flight may belong to.
  static constexpr int kSegments = kDequantizers > 0 && kStages < 3 ? 3 : kStages;
  static constexpr int kTeams = kTeams_, kTeamWarps = kProducers / kTeams;
  static_assert(kTeams <= kStages);
  static constexpr int kMyTokens = kTokens / kTeamWarps;                // tokens of a tile that one producer copies
  static constexpr int kChunk = kMyTokens < kWarp ? kMyTokens : kWarp;  // tokens that a warp looks up at once
  static_assert(kTokens % 64 == 0 && kMyTokens % kChunk == 0 && kChunk % 16 == 0);
  using Stage = attention::Stage<kTokens, kRowBytes>;

  // After the dequantized tiles, if any, which end at a multiple of 1024 bytes.
  alignas(kDequantizers > 0 ? 128 : 1024) Stage stages[kStages];
  // Bit j: token j of these 16 is on a valid page and visible to some row.
  alignas(8) uint16_t present[kStages][kTokens / 16];
  Segment segments[kSegments];
  Mbarrier full[kStages], empty[kStages], segment_full[kSegments], segment_empty[kSegments];
  // `full` and `empty` are then those of K and of `present`.
  Mbarrier full_v[kTma ? kStages : 1], empty_v[kTma ? kStages : 1];

  // Initialize the barriers. Call from one thread, before the block's first __syncthreads().
  __device__ void init() {
    const int readers = kReaders * static_cast<int>(kTma ? Cluster::size() : 1);
    for (int s = 0; s < kStages; ++s) {
      full[s].init((kWarp + 1) * kTeamWarps);
      empty[s].init(readers);
      if constexpr (kTma) {
        full_v[s].init(kWarp * kTeamWarps);
        empty_v[s].init(readers);
      }
    }
    for (int s = 0; s < kSegments; ++s) {
      segment_full[s].init(1);
      segment_empty[s].init(kConsumers + kDequantizers + (kTma ? kProducers : 0));
    }
  }

  __device__ const unsigned char* keys(int stage) const { return stages[stage].k; }
  __device__ const unsigned char* values(int stage) const { return stages[stage].v; }
  // Return a mask: bit j is set if token 64 word + j of the stage's tile is present.
  __device__ uint64_t present_tokens(int stage, int word) const {
    return reinterpret_cast<const uint64_t*>(present[stage])[word];
  }

  // A consumer's position in the ring.
  struct Cursor {
    Turn<kStages> turn;
    __device__ void advance() { turn.advance(); }
    __device__ Turn<kStages> key() const { return turn; }
    __device__ Turn<kStages> value() const { return turn; }
  };

  // Run a producer warp from start to end. Each producer walks the segments by itself, and the first one also publishes
  // them to the consumers. With kTma, registers are scarce: there only the first producer walks, and the others wait
  // for the segments it publishes, like the consumers.
  __device__ void produce(const TreeAttentionParams& p, const DevicePlan& plan, int worker,
                          const TensorMaps* maps = nullptr) {
    const int producer = threadIdx.x / kWarp - kConsumers;
    StreamKState walk;
    WholeItems whole_items;
    CachedRequests cached_requests;
    // Keep the walk's state in memory between steps.
    if constexpr (kTma) asm volatile("" ::"l"(&walk) : "memory");
    Turn<kSegments> turn;
    Turn<kStages> stage;
    int skip = producer / kTeamWarps;  // tiles of other teams before this team's next one
    stage.advance_by(skip);
#pragma unroll 1
    while (true) {
      Segment mine;
      if (!kTma || producer == 0) {
        if (plan.whole_items) {
          mine = whole_items.next_segment(p, plan, worker);
        } else {
          StreamK<!kTma> stream_k(p, plan, walk, cached_requests);
          mine = stream_k.next_segment(worker);
          walk = stream_k;
        }
        if (producer == 0) publish_segment(mine, turn);
      }
      if constexpr (kTma) segment_full[turn.at].wait(turn.parity);
      const Segment& s = kTma ? segments[turn.at] : mine;
      if (s.kv_head < 0) {
        if (kTma && kTeams == 1 && producer == 0 && Cluster::size() > 1) wait_for_all_readers(stage);
        return;
      }
      if (!s.merge) copy_segment(p, plan, s, producer, skip, stage, maps);
      if constexpr (kTma) {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) segment_empty[turn.at].arrive();
      }
      turn.advance();
    }
  }

 protected:
  static constexpr int kChunks = kMyTokens / kChunk;

  __device__ __forceinline__ void publish_segment(const Segment& s, Turn<kSegments> turn) {
    if (threadIdx.x % kWarp == 0) {
      segment_empty[turn.at].wait(turn.parity ^ 1);
      segments[turn.at] = s;
      segment_full[turn.at].arrive();
    }
    __syncwarp();
  }

  // Copy this producer's tokens of all tiles of a segment.
  __device__ __forceinline__ void copy_segment(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                               int producer, int& skip, Turn<kStages>& stage, const TensorMaps* maps) {
    if (producer == 0 && !kTma) prefetch_queries(p, plan, s);
    if (producer == 1) prefetch_lookups(p, plan, s);
    const int my_first = producer % kTeamWarps * kMyTokens, end_tile = s.end_tile;
    // Pinned in a register, here and below: a producer has little time per tile.
    const int lane = hold(threadIdx.x % kWarp);
    // Pages before the range may have been freed.
    const Span range{visible_begin(p, s.request, plan.gqa_group.div(s.first_row)), s.request.end};
    int tile = s.first_tile + skip;
    Pages pages = lookup_pages(p, plan, s, range, lane, tile * kTokens + my_first);
#pragma unroll 1
    for (; tile < end_tile; tile += kTeams, stage.advance_by(kTeams)) {
      const int first = tile * kTokens + my_first;
      if constexpr (kTma) {
        if (maps->usable && copy_tma(p, plan, s, *maps, range, lane, first, my_first, stage, pages)) {
          if (tile + kTeams < end_tile) pages = lookup_pages(p, plan, s, range, lane, first + kTeams * kTokens);
          continue;
        }
      }
      const Addresses now = resolve_addresses(p, plan, s, range, first, pages);
      if (tile + kTeams < end_tile) pages = lookup_pages(p, plan, s, range, lane, first + kTeams * kTokens);
      Stage& to = stages[stage.at];
      empty[stage.at].wait(stage.parity ^ 1);  // passes at once in the first round: all stages start empty
      copy(p.k_pool, to.k, my_first, now.k, now.present);
      if constexpr (kTma) {
        publish(stage.at, my_first, now);
        empty_v[stage.at].wait(stage.parity ^ 1);
      }
      copy(p.v_pool, to.v, my_first, now.v, now.present);
      if constexpr (kTma)
        full_v[stage.at].arrive_after_copies();
      else
        publish(stage.at, my_first, now);
    }
    skip = tile - end_tile;
  }

  // Page table entries of this producer's tokens lane % kChunk, that + kChunk, ..., or -1 outside the range. Nothing is
  // computed from them when they are loaded, so that the previous tile is copied while the loads are in flight.
  struct Pages {
    int page[kChunks];
  };
  __device__ static Pages lookup_pages(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                       Span range, int lane, int first) {
    Pages pages;
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const int row = first + n * kChunk + lane % kChunk;
      pages.page[n] = -1;
      if (row >= range.begin && row < range.end)  // the range does not exceed the table
        pages.page[n] = __ldg(p.rows.page_table + s.request.slot * p.rows.max_pages + plan.page_size.div(row));
    }
    return pages;
  }

  // Prefetch a segment's query rows into the L2: consumers need them as soon as they reach the segment.
  __device__ static void prefetch_queries(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s) {
    const int lane = threadIdx.x % kWarp, end = s.request.valid_rows * plan.gqa_group.divisor;
    const int first = s.first_row + static_cast<int>(blockIdx.x) % plan.row_tiles * plan.tile_rows;
    const char* q = static_cast<const char*>(p.q);
#pragma unroll 1
    for (int n = first + lane; n < min(first + plan.tile_rows, end); n += kWarp) {
      const QueryRow at = query_row(plan, s.kv_head, n);
      const char* row = q + 2 * (s.request.q_start + at.row * p.q_strides.row + at.head * p.q_strides.head);
      for (int byte = 0; byte < 2 * p.head_dim; byte += 128) prefetch(row + byte);
    }
  }
  // Prefetch what a segment's tiles look up one by one: the page table entries (as far as one cache line per lane
  // reaches) and the mask.
  __device__ static void prefetch_lookups(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s) {
    const int lane = threadIdx.x % kWarp, page = plan.page_size.div(s.first_tile * kTokens) + lane * 32;
    if (page <= plan.page_size.div(min(s.end_tile * kTokens, s.request.end) - 1))
      prefetch(p.rows.page_table + s.request.slot * p.rows.max_pages + page);
    if (p.mask != nullptr)
      for (int64_t n = lane * 16; n < s.request.valid_rows * p.mask_words; n += kWarp * 16)
        prefetch(p.mask + s.request.flat_row * p.mask_words + n);
  }

  // Offsets of the same tokens in the pools, in units of 16 bytes; 0 for tokens that are not present.
  struct Addresses {
    uint32_t k[kChunks], v[kChunks], present[kChunks];

    __device__ void publish(uint16_t* to, int n) const {
#pragma unroll
      for (int i = 0; i < kChunk / 16; ++i) to[i] = static_cast<uint16_t>(present[n] >> 16 * i);
    }
  };
  // Compute the addresses of the tokens from `first` on. Set kBadPage in the request's status for tokens on an invalid
  // page.
  __device__ static Addresses resolve_addresses(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                                Span range, int first, const Pages& pages) {
    Addresses addresses;
    const int lane = threadIdx.x % kWarp, mine = lane % kChunk, bytes = kRowBytes / static_cast<int>(p.head_dim);
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const int row = first + n * kChunk + mine;
      kv::KvRow at;
      at.page = pages.page[n];
      at.offset = plan.page_size.rem(row);
      bool is_present = at.page >= 0 && at.page < p.rows.num_pages;
      if (!is_present && row >= range.begin && row < range.end) set_status(p.status, s.request.slot, kBadPage);
      // A token that no row of the request attends to may never have been written, so it is not read.
      if (p.mask != nullptr && first + (n + 1) * kChunk > s.request.prefix) {
        uint32_t visible = 0;
#pragma unroll 1
        for (int i = lane; i < s.request.valid_rows; i += kWarp)
          visible |= static_cast<uint32_t>(visible_word(p, s.request, i, first + n * kChunk));
        is_present &= __reduce_or_sync(kFullMask, visible) >> mine & 1;
      }
      addresses.present[n] = __ballot_sync(kFullMask, is_present);
      addresses.k[n] = is_present ? static_cast<uint32_t>(row_start(p.k_strides, at, s.kv_head) * bytes / 16) : 0;
      addresses.v[n] = is_present ? static_cast<uint32_t>(row_start(p.v_strides, at, s.kv_head) * bytes / 16) : 0;
    }
    return addresses;
  }

  // Copy this producer's tokens of a tile by TMA. Return false, having done nothing, unless all of them may be read and
  // all are on valid pages.
  __device__ __forceinline__ bool copy_tma(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                           const TensorMaps& maps, Span range, int lane, int first, int my_first,
                                           Turn<kStages> stage, const Pages& pages) {
    constexpr int kPanels = kRowBytes / Stage::kLine;
    // In a chain every tail token is visible to some row. In a tree some tail tokens may be unwritten.
    bool copyable = first >= range.begin && first + kMyTokens <= (p.mask ? s.request.prefix : s.request.end);
#pragma unroll
    for (int n = 0; n < kChunks; ++n) copyable &= pages.page[n] >= 0 && pages.page[n] < p.rows.num_pages;
    if (!__all_sync(kFullMask, copyable)) return false;
    // In a cluster of two, each block issues every second box, for both blocks.
    const bool multicast = Cluster::size() == 2;
    const int panel = lane % kTmaBoxTokens, row = my_first + lane / kTmaBoxTokens * kTmaBoxTokens, head = s.kv_head;
    const bool mine = lane < kChunk && panel < kPanels &&
                      (!multicast || (panel + lane / kTmaBoxTokens) % 2 == static_cast<int>(Cluster::rank()));
    const int column = panel * static_cast<int>(p.head_dim) / kPanels;
    int page_offset[kChunks];  // offset of the token in its page
#pragma unroll
    for (int n = 0; n < kChunks; ++n) page_offset[n] = hold(plan.page_size.rem(first + row - my_first + n * kChunk));
    const auto issue = [&](Mbarrier& full, const CUtensorMap& map, unsigned char* to) {
#pragma unroll
      for (int n = 0; n < kChunks; ++n)
        if (mine) {
          unsigned char* const place = to + panel * Stage::kPanel + (row + n * kChunk) * Stage::kLine;
          if (multicast)
            full.copy_box_to(3, place, &map, column, head, page_offset[n], pages.page[n]);
          else
            full.copy_box(place, &map, column, head, page_offset[n], pages.page[n]);
        }
    };
    empty[stage.at].wait(stage.parity ^ 1);
    if (lane == 0) {
      for (int n = 0; n < kMyTokens / 16; ++n) present[stage.at][my_first / 16 + n] = 0xffff;
      full[stage.at].arrive_expecting(kWarp + 1, kMyTokens * kRowBytes);
    }
    __syncwarp();
    issue(full[stage.at], maps.k, stages[stage.at].k);
    empty_v[stage.at].wait(stage.parity ^ 1);
    if (lane == 0) full_v[stage.at].arrive_expecting(kWarp, kMyTokens * kRowBytes);
    __syncwarp();
    issue(full_v[stage.at], maps.v, stages[stage.at].v);
    return true;
  }

  // Wait until all stages are released. The other block of the cluster arrives at this block's barriers for its
  // readers, so this block must not exit before that.
  __device__ void wait_for_all_readers(Turn<kStages> stage) {
#pragma unroll 1
    for (int n = 0; n < kStages; ++n, stage.advance()) {
      empty[stage.at].wait(stage.parity ^ 1);
      empty_v[stage.at].wait(stage.parity ^ 1);
    }
  }

  // Arrive at `full` once the copies issued so far complete, and publish which of the tokens are present.
  __device__ __forceinline__ void publish(int stage, int my_first, const Addresses& addresses) {
    full[stage].arrive_after_copies();
    if (threadIdx.x % kWarp != 0) return;
#pragma unroll
    for (int n = 0; n < kChunks; ++n) addresses.publish(present[stage] + (my_first + n * kChunk) / 16, n);
    full[stage].arrive();
  }

  // Copy tokens, and zero-fill those that are not present: stale data must not be read even with weight 0.
  __device__ __forceinline__ static void copy(const void* from, unsigned char* to, int my_first,
                                              const uint32_t (&starts)[kChunks], const uint32_t (&present)[kChunks]) {
    constexpr int kPieces = kRowBytes / 16, kRowsPerStep = kWarp / kPieces;
    // Addresses of this many of the warp's copies are computed before the first of them is issued.
    constexpr int kBatch = kChunk / kRowsPerStep < 8 ? kChunk / kRowsPerStep : 8;
    static_assert(kPieces <= kWarp);
    const int lane = threadIdx.x % kWarp, my_row = lane / kPieces, piece = lane % kPieces;
    const uint32_t my_to =
        static_cast<uint32_t>(__cvta_generic_to_shared(to)) + Stage::offset(my_row, piece) + my_first * Stage::kLine;
    const char* pool = static_cast<const char*>(from) + piece * 16;
    asm volatile("" : "+l"(pool));  // folds into one addition, instead of one per copy
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const uint32_t missing = ~present[n] >> my_row;
#pragma unroll
      for (int begin = 0; begin < kChunk; begin += kBatch * kRowsPerStep) {
        const char* row_from[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          row_from[i] = pool + __shfl_sync(kFullMask, starts[n], begin + i * kRowsPerStep + my_row) * int64_t{16};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int row = begin + i * kRowsPerStep;
          copy_16((my_to ^ Stage::swizzle(row)) + (n * kChunk + row) * Stage::kLine, row_from[i],
                  missing & 1u << row ? 0 : 16);
        }
      }
    }
  }
  __device__ __forceinline__ static void copy_16(uint32_t to, const char* from, unsigned bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
};

}  // namespace specdec::attention
