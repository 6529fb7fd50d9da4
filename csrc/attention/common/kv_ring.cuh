// The KV of a worker's share as a ring of KV tiles in shared memory. A few producer warps fill it, since one warp alone
// starts a copy every 60 cycles only. They walk the worker's segments (stream-K, or whole items), look up the pages of
// their tokens one tile ahead, and copy rows with cp.async, 16 bytes at a time: one path serves every page size and any
// strides, and a row of one head (128 bytes or more) is whole sectors anyway. Where there are many query rows, the copy
// engine copies boxes of 16 tokens instead, as long as these lie in the prefix or in a chain and on one page, so that
// exponentials do not queue behind copies. Two blocks that walk the same KV in step may be a cluster: each then starts
// half of the boxes, which go to both, and the L2 is read once instead of twice. The other warps consume the tiles and
// release each stage when they are done with it. Producers and consumers meet at barriers alone.
//
// In the kernels a "token" is a KV row, and a "row" is a query row times a head of its GQA group.
#pragma once

#include "attention/common/stream_k.cuh"
#include "attention/sm90/tensor_maps.h"
#include "core/cluster.cuh"
#include "core/cuda.cuh"
#include "core/mbarrier.cuh"

namespace specdec::attention {

// A stage keeps K and V of a tile in panels of 128 bytes of every token: byte c of token j lies in panel c / 128 at 128
// j + (c % 128 ^ (j % 8 * 16)). ldmatrix reads that swizzle without bank conflicts, and Hopper's tensor cores read it
// themselves (128 bytes, K-major for K, MN-major for V). Tokens of 64 or 32 bytes lie side by side in one panel, with
// the swizzles that Hopper has for those.
template <int kTokens, int kRowBytes>
struct Stage {
  static constexpr int kLine = kRowBytes < 128 ? kRowBytes : 128;  // bytes of a token in a panel
  static constexpr int kPanel = kTokens * kLine;
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes % 128 == 0);

  unsigned char k[kTokens * kRowBytes];
  unsigned char v[kTokens * kRowBytes];

  // Where 16-byte piece `piece` of token `row` begins.
  __device__ static constexpr int offset(int row, int piece) {
    constexpr int kPieces = kLine / 16;
    return (piece / kPieces * kPanel + row * kLine + piece % kPieces * 16) ^ swizzle(row);
  }
  // The swizzle: what the place of a token's bytes in its line is xored with.
  __device__ static constexpr int swizzle(int row) { return row / (128 / kLine) % (kLine / 16) * 16; }
};

// Warps 0 to kConsumers - 1 of the block consume, the next kProducers produce. K and V of a tile share their barriers;
// in a mapped ring, which the copy engine fills where it can, each has its own, so that scores do not wait for V, and
// the next K comes while V is still multiplied. Where kDequantisers warps turn the tiles into others, it is they who
// read the stages, which lie behind those others. kReaders warps read each stage, in each block of a cluster. The
// producers share every tile, or are kTurns teams that take turns at whole tiles.
template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_, int kProducers_, bool kMapped_ = false,
          int kDequantisers_ = 0, int kReaders_ = (kDequantisers_ > 0 ? kDequantisers_ : kConsumers_), int kTurns_ = 1>
struct KvRing {
  static constexpr int kTokens = kTokens_, kRowBytes = kRowBytes_, kStages = kStages_;
  static constexpr int kConsumers = kConsumers_, kProducers = kProducers_;
  static constexpr bool kMapped = kMapped_, kApart = kMapped_;
  static constexpr int kDequantisers = kDequantisers_, kReaders = kReaders_;
  static constexpr int kSegments =
      kDequantisers > 0 && kStages < 3 ? 3 : kStages;  // segments that the tiles in flight may belong to
  static constexpr int kTurns = kTurns_, kTeam = kProducers / kTurns;
  static_assert(kTurns <= kStages);
  static constexpr int kMyTokens = kTokens / kTeam;                     // tokens of a tile that one producer copies
  static constexpr int kChunk = kMyTokens < kWarp ? kMyTokens : kWarp;  // tokens that a warp looks up at once
  static_assert(kTokens % 64 == 0 && kMyTokens % kChunk == 0 && kChunk % 16 == 0);
  using Stage = attention::Stage<kTokens, kRowBytes>;

  alignas(kDequantisers > 0 ? 128 : 1024) Stage stages[kStages];  // behind other tiles, which end on 1024 bytes
  alignas(8) uint16_t present[kStages][kTokens / 16];  // bit j: token j of these 16 is on a page, and some row sees it
  Segment segments[kSegments];
  Mbarrier full[kStages], empty[kStages], announced[kSegments], read[kSegments];
  Mbarrier full_v[kMapped ? kStages : 1],
      empty_v[kMapped ? kStages : 1];  // full and empty are then of K and of `present`

  // By one thread, before the block's first barrier.
  __device__ void init() {
    const int readers = kReaders * static_cast<int>(kMapped ? Cluster::size() : 1);
    for (int s = 0; s < kStages; ++s) {
      full[s].init((kWarp + 1) * kTeam);
      empty[s].init(readers);
      if constexpr (kMapped) {
        full_v[s].init(kWarp * kTeam);
        empty_v[s].init(readers);
      }
    }
    for (int s = 0; s < kSegments; ++s) {
      announced[s].init(1);
      read[s].init(kConsumers + kDequantisers + (kMapped ? kProducers : 0));
    }
  }

  __device__ const unsigned char* keys(int stage) const { return stages[stage].k; }
  __device__ const unsigned char* values(int stage) const { return stages[stage].v; }
  // Bit j: token 64 word + j of the stage's tile is present.
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

  // The whole life of a producer warp. Each producer walks the segments for itself, and the first one announces them to
  // the consumers. In a mapped ring registers are short: there the first producer alone walks, and the others wait for
  // its announcements too.
  __device__ void produce(const TreeAttentionParams& p, const DevicePlan& plan, int worker,
                          const TensorMaps* maps = nullptr) {
    const int producer = threadIdx.x / kWarp - kConsumers;
    StreamKState walk;
    WholeItems whole_items;
    CachedRequests known;
    // Such a walk keeps its state in memory between steps.
    if constexpr (kMapped) asm volatile("" ::"l"(&walk) : "memory");
    Turn<kSegments> turn;
    Turn<kStages> stage;
    int skip = producer / kTeam;  // tiles of other teams before this one's next
    stage.advance_by(skip);
#pragma unroll 1
    while (true) {
      Segment mine;
      if (!kMapped || producer == 0) {
        if (plan.whole_items) {
          mine = whole_items.next_segment(p, plan, worker);
        } else {
          StreamK<!kMapped> stream_k(p, plan, walk, known);
          mine = stream_k.next_segment(worker);
          walk = stream_k;
        }
        if (producer == 0) announce(mine, turn);
      }
      if constexpr (kMapped) announced[turn.at].wait(turn.parity);
      const Segment& s = kMapped ? segments[turn.at] : mine;
      if (s.kv_head < 0) {
        if (kMapped && kTurns == 1 && producer == 0 && Cluster::size() > 1) wait_for_all_readers(stage);
        return;
      }
      if (!s.merge) copy_segment(p, plan, s, producer, skip, stage, maps);
      if constexpr (kMapped) {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) read[turn.at].arrive();
      }
      turn.advance();
    }
  }

 protected:
  static constexpr int kEach = kMyTokens / kChunk;

  __device__ __forceinline__ void announce(const Segment& s, Turn<kSegments> turn) {
    if (threadIdx.x % kWarp == 0) {
      read[turn.at].wait(turn.parity ^ 1);
      segments[turn.at] = s;
      announced[turn.at].arrive();
    }
    __syncwarp();
  }

  // Copies a producer's tokens of all tiles of a segment.
  __device__ __forceinline__ void copy_segment(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                               int producer, int& skip, Turn<kStages>& stage, const TensorMaps* maps) {
    if (producer == 0 && !kMapped) prefetch_queries(p, plan, s);
    if (producer == 1) prefetch_lookups(p, plan, s);
    const int my_first = producer % kTeam * kMyTokens, end_tile = s.end_tile;
    const int lane = hold(threadIdx.x % kWarp);  // held here and below: a producer has little time for a tile
    // Pages before the range may have been freed.
    const Span range{visible_begin(p, s.request, plan.gqa_group.div(s.first_row)), s.request.end};
    int tile = s.first_tile + skip;
    Pages pages = find_pages(p, plan, s, range, lane, tile * kTokens + my_first);
#pragma unroll 1
    for (; tile < end_tile; tile += kTurns, stage.advance_by(kTurns)) {
      const int first = tile * kTokens + my_first;
      if constexpr (kMapped) {
        if (maps->usable && copy_boxes(p, plan, s, *maps, range, lane, first, my_first, stage, pages)) {
          if (tile + kTurns < end_tile) pages = find_pages(p, plan, s, range, lane, first + kTurns * kTokens);
          continue;
        }
      }
      const Addresses now = find_addresses(p, plan, s, range, first, pages);
      if (tile + kTurns < end_tile) pages = find_pages(p, plan, s, range, lane, first + kTurns * kTokens);
      Stage& to = stages[stage.at];
      empty[stage.at].wait(stage.parity ^ 1);  // the first round finds all stages empty
      copy(p.k_pool, to.k, my_first, now.k, now.present);
      if constexpr (kMapped) {
        publish(stage.at, my_first, now);
        empty_v[stage.at].wait(stage.parity ^ 1);
      }
      copy(p.v_pool, to.v, my_first, now.v, now.present);
      if constexpr (kMapped)
        full_v[stage.at].arrive_after_copies();
      else
        publish(stage.at, my_first, now);
    }
    skip = tile - end_tile;
  }

  // The page table's entries of a producer's tokens lane % kChunk, that + kChunk, ..., or -1 outside the range. Nothing
  // is computed from them when they are loaded, so that the tile before is copied while they come.
  struct Pages {
    int page[kEach];
  };
  __device__ static Pages find_pages(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s, Span range,
                                     int lane, int first) {
    Pages pages;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = first + n * kChunk + lane % kChunk;
      pages.page[n] = -1;
      if (row >= range.begin && row < range.end)  // the range does not exceed the table
        pages.page[n] = __ldg(p.rows.page_table + s.request.slot * p.rows.max_pages + plan.page_size.div(row));
    }
    return pages;
  }

  // Prefetches the query rows of a segment into the L2: consumers need them at once when they come to it.
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
  // Prefetches what a segment's tiles look up one by one: the page table's entries, as far as one line for each lane
  // reaches, and the mask.
  __device__ static void prefetch_lookups(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s) {
    const int lane = threadIdx.x % kWarp, page = plan.page_size.div(s.first_tile * kTokens) + lane * 32;
    if (page <= plan.page_size.div(min(s.end_tile * kTokens, s.request.end) - 1))
      prefetch(p.rows.page_table + s.request.slot * p.rows.max_pages + page);
    if (p.mask != nullptr)
      for (int64_t n = lane * 16; n < s.request.valid_rows * p.mask_words; n += kWarp * 16)
        prefetch(p.mask + s.request.flat_row * p.mask_words + n);
  }

  // Where the same tokens begin in their pools, in units of 16 bytes; 0 for tokens that are not present.
  struct Addresses {
    uint32_t k[kEach], v[kEach], present[kEach];

    __device__ void publish(uint16_t* to, int n) const {
#pragma unroll
      for (int i = 0; i < kChunk / 16; ++i) to[i] = static_cast<uint16_t>(present[n] >> 16 * i);
    }
  };
  __device__ static Addresses find_addresses(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                             Span range, int first, const Pages& pages) {
    Addresses addresses;
    const int lane = threadIdx.x % kWarp, mine = lane % kChunk, bytes = kRowBytes / static_cast<int>(p.head_dim);
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = first + n * kChunk + mine;
      kv::KvRow at;
      at.page = pages.page[n];
      at.offset = plan.page_size.rem(row);
      bool there = at.page >= 0 && at.page < p.rows.num_pages;
      if (!there && row >= range.begin && row < range.end) set_status(p.status, s.request.slot, kBadPage);
      // A token that no row of the request sees may never have been written, so it is not read.
      if (p.mask != nullptr && first + (n + 1) * kChunk > s.request.prefix) {
        uint32_t seen = 0;
#pragma unroll 1
        for (int i = lane; i < s.request.valid_rows; i += kWarp)
          seen |= static_cast<uint32_t>(visible_word(p, s.request, i, first + n * kChunk));
        there &= __reduce_or_sync(kFullMask, seen) >> mine & 1;
      }
      addresses.present[n] = __ballot_sync(kFullMask, there);
      addresses.k[n] = there ? static_cast<uint32_t>(row_start(p.k_strides, at, s.kv_head) * bytes / 16) : 0;
      addresses.v[n] = there ? static_cast<uint32_t>(row_start(p.v_strides, at, s.kv_head) * bytes / 16) : 0;
    }
    return addresses;
  }

  // Copies a warp's tokens of a tile by the copy engine. Returns false unless all of them may be read, in pages of
  // whole boxes.
  __device__ __forceinline__ bool copy_boxes(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                             const TensorMaps& maps, Span range, int lane, int first, int my_first,
                                             Turn<kStages> stage, const Pages& pages) {
    constexpr int kPanels = kRowBytes / Stage::kLine;
    // Of the tail of a chain some row sees every token; of a tree's there may be some that nobody has written.
    bool whole = first >= range.begin && first + kMyTokens <= (p.mask ? s.request.prefix : s.request.end);
#pragma unroll
    for (int n = 0; n < kEach; ++n) whole &= pages.page[n] >= 0 && pages.page[n] < p.rows.num_pages;
    if (!__all_sync(kFullMask, whole)) return false;
    // Of a cluster's two blocks each starts every second box, for both.
    const bool pair = Cluster::size() == 2;
    const int panel = lane % kBoxTokens, row = my_first + lane / kBoxTokens * kBoxTokens, head = s.kv_head;
    const bool mine = lane < kChunk && panel < kPanels &&
                      (!pair || (panel + lane / kBoxTokens) % 2 == static_cast<int>(Cluster::rank()));
    const int column = panel * static_cast<int>(p.head_dim) / kPanels;
    int inside[kEach];  // token's offset in its page
#pragma unroll
    for (int n = 0; n < kEach; ++n) inside[n] = hold(plan.page_size.rem(first + row - my_first + n * kChunk));
    const auto start = [&](Mbarrier& full, const CUtensorMap& map, unsigned char* to) {
#pragma unroll
      for (int n = 0; n < kEach; ++n)
        if (mine) {
          unsigned char* const place = to + panel * Stage::kPanel + (row + n * kChunk) * Stage::kLine;
          if (pair)
            full.copy_box_to(3, place, &map, column, head, inside[n], pages.page[n]);
          else
            full.copy_box(place, &map, column, head, inside[n], pages.page[n]);
        }
    };
    empty[stage.at].wait(stage.parity ^ 1);
    if (lane == 0) {
      for (int n = 0; n < kMyTokens / 16; ++n) present[stage.at][my_first / 16 + n] = 0xffff;
      full[stage.at].arrive_expecting(kWarp + 1, kMyTokens * kRowBytes);
    }
    __syncwarp();
    start(full[stage.at], maps.k, stages[stage.at].k);
    empty_v[stage.at].wait(stage.parity ^ 1);
    if (lane == 0) full_v[stage.at].arrive_expecting(kWarp, kMyTokens * kRowBytes);
    __syncwarp();
    start(full_v[stage.at], maps.v, stages[stage.at].v);
    return true;
  }

  // The other block of the cluster counts its readers in at this one's barriers, so this one has to stay until it has.
  __device__ void wait_for_all_readers(Turn<kStages> stage) {
#pragma unroll 1
    for (int n = 0; n < kStages; ++n, stage.advance()) {
      empty[stage.at].wait(stage.parity ^ 1);
      empty_v[stage.at].wait(stage.parity ^ 1);
    }
  }

  // Makes `full` wait for the tokens copied so far, and says which of them are present.
  __device__ __forceinline__ void publish(int stage, int my_first, const Addresses& addresses) {
    full[stage].arrive_after_copies();
    if (threadIdx.x % kWarp != 0) return;
#pragma unroll
    for (int n = 0; n < kEach; ++n) addresses.publish(present[stage] + (my_first + n * kChunk) / 16, n);
    full[stage].arrive();
  }

  // Copies tokens, and zeros for those that are not present: whatever is stored there must not be met, even with weight
  // 0.
  __device__ __forceinline__ static void copy(const void* from, unsigned char* to, int my_first,
                                              const uint32_t (&starts)[kEach], const uint32_t (&present)[kEach]) {
    constexpr int kPieces = kRowBytes / 16, kRowsAtOnce = kWarp / kPieces;
    // The addresses of so many of a warp's copies are ready before the first of them starts.
    constexpr int kBatch = kChunk / kRowsAtOnce < 8 ? kChunk / kRowsAtOnce : 8;
    static_assert(kPieces <= kWarp);
    const int lane = threadIdx.x % kWarp, my_row = lane / kPieces, piece = lane % kPieces;
    const uint32_t my_to =
        static_cast<uint32_t>(__cvta_generic_to_shared(to)) + Stage::offset(my_row, piece) + my_first * Stage::kLine;
    const char* pool = static_cast<const char*>(from) + piece * 16;
    asm volatile("" : "+l"(pool));  // makes one addition of it, not one for each copy
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const uint32_t missing = ~present[n] >> my_row;
#pragma unroll
      for (int begin = 0; begin < kChunk; begin += kBatch * kRowsAtOnce) {
        const char* row_from[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          row_from[i] = pool + __shfl_sync(kFullMask, starts[n], begin + i * kRowsAtOnce + my_row) * int64_t{16};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int row = begin + i * kRowsAtOnce;
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
