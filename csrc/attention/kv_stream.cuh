// The KV of a worker's share as a stream of tiles through shared memory. A few warps produce it, since one alone starts
// a copy every 60 cycles only: they walk the work line, or from one whole group to the next, and each looks up its
// rows' pages one tile ahead and copies rows with cp.async, 16 bytes at a time, so that every page size and any strides
// are one path and a row of one head (128 bytes or more) is whole sectors anyway. For many query rows the copy engine
// takes boxes of 16 KV rows, where all of them are in the prefix and on one page: exponentials have no copies to queue
// with then. Two blocks that walk the same KV in step may be a cluster: each then starts half of the boxes, which go to
// both, and the L2 is read once instead of twice. The other warps consume the stream and free each stage when they are
// done with it; only barriers connect them.
#pragma once

#include "attention/pool_maps.h"
#include "attention/work_line.cuh"
#include "core/cluster.cuh"
#include "core/hold.cuh"
#include "core/mbarrier.cuh"
#include "core/prefetch.cuh"
#include "core/turn.cuh"

namespace specdec {

// K and V of a tile are kept in panels of 128 bytes of every row: byte c of row j lies in panel c / 128 at
// 128 j + (c % 128 ^ (j % 8 * 16)). That is the swizzle which ldmatrix reads without bank conflicts and which the
// tensor cores of Hopper read themselves (128 bytes, K-major for K, MN-major for V). Shorter rows, of 64 or 32 bytes,
// lie side by side in one panel, with the swizzles that Hopper has for those.
template <int kTokens, int kRowBytes>
struct Stage {
  static constexpr int kLine = kRowBytes < 128 ? kRowBytes : 128;  // bytes of a row in a panel
  static constexpr int kPanel = kTokens * kLine;
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes % 128 == 0);

  unsigned char k[kTokens * kRowBytes];
  unsigned char v[kTokens * kRowBytes];

  // Of 16-byte piece `piece` of row `row`.
  __device__ static constexpr int offset(int row, int piece) {
    constexpr int kPieces = kLine / 16;
    return (piece / kPieces * kPanel + row * kLine + piece % kPieces * 16) ^ swizzle(row);
  }
  // What the place of a row's bytes in its line is changed by.
  __device__ static constexpr int swizzle(int row) { return row / (128 / kLine) % (kLine / 16) * 16; }
};

// Warps 0 to kConsumers - 1 of the block consume, the next kProducers produce. K and V of a tile come and go together;
// in a mapped stream, which has copies from the copy engine where it can, each for itself: scores do not wait for V,
// and the next K comes while V is still multiplied. Where kWideners warps make other tiles of these for the consumers,
// behind which they lie, it is they who read the stages. kReaders warps read each stage, in each block of a cluster.
// Producers share every tile, or are kTurns teams that take turns.
template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_, int kProducers_, bool kMapped_ = false,
          int kWideners_ = 0, int kReaders_ = (kWideners_ > 0 ? kWideners_ : kConsumers_), int kTurns_ = 1>
struct KvStream {
  static constexpr int kTokens = kTokens_, kRowBytes = kRowBytes_, kStages = kStages_;
  static constexpr int kConsumers = kConsumers_, kProducers = kProducers_;
  static constexpr bool kMapped = kMapped_, kApart = kMapped_;
  static constexpr int kWideners = kWideners_, kReaders = kReaders_;
  static constexpr int kSegments = kWideners > 0 && kStages < 3 ? 3 : kStages;  // as many as their tiles may belong to
  static constexpr int kTurns = kTurns_, kTeam = kProducers / kTurns;
  static_assert(kTurns <= kStages);
  static constexpr int kMyRows = kTokens / kTeam;                   // of a tile, a producer's
  static constexpr int kChunk = kMyRows < kWarp ? kMyRows : kWarp;  // rows that a warp looks up at once
  static_assert(kTokens % 64 == 0 && kMyRows % kChunk == 0 && kChunk % 16 == 0);
  using Stage = specdec::Stage<kTokens, kRowBytes>;

  alignas(kWideners > 0 ? 128 : 1024) Stage stages[kStages];  // behind other tiles, that is on 1024 bytes
  alignas(8) uint16_t there[kStages][kTokens / 16];  // bit j: row j of these 16 is on a page and seen by some row
  Segment segments[kSegments];
  Mbarrier full[kStages], empty[kStages], announced[kSegments], read[kSegments];
  Mbarrier full_v[kMapped ? kStages : 1], empty_v[kMapped ? kStages : 1];  // those before are then of K and `there`

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
      read[s].init(kConsumers + kWideners + (kMapped ? kProducers : 0));
    }
  }

  __device__ const unsigned char* keys(int stage) const { return stages[stage].k; }
  __device__ const unsigned char* values(int stage) const { return stages[stage].v; }
  // Bit j: row 64 word + j of the stage's tile is there.
  __device__ uint64_t rows_there(int stage, int word) const {
    return reinterpret_cast<const uint64_t*>(there[stage])[word];
  }

  // Where a consumer is.
  struct Place {
    Turn<kStages> turn;
    __device__ void advance() { turn.advance(); }
    __device__ Turn<kStages> key() const { return turn; }
    __device__ Turn<kStages> value() const { return turn; }
  };

  // A producer warp's whole life. Each walks for itself, and the first one announces its segments to the
  // consumers; in a mapped stream, where registers are short, it alone walks, and the others wait for what it
  // announces.
  __device__ void produce(const TreeAttentionParams& p, const Cut& cut, int worker, const PoolMaps* maps = nullptr) {
    const int producer = threadIdx.x / kWarp - kConsumers;
    WalkState walk;
    WholeGroups groups;
    KnownRequests known;
    // Between its steps such a walk rests in memory.
    if constexpr (kMapped) asm volatile("" ::"l"(&walk) : "memory");
    Turn<kSegments> turn;
    Turn<kStages> stage;
    int skip = producer / kTeam;  // tiles of others before this one's
    stage.advance_by(skip);
#pragma unroll 1
    while (true) {
      Segment mine;
      if (!kMapped || producer == 0) {
        if (cut.whole) {
          mine = groups.next_of(p, cut, worker);
        } else {
          WorkLine<!kMapped> line(p, cut, walk, known);
          mine = line.next_of(worker);
          walk = line;
        }
        if (producer == 0) announce(mine, turn);
      }
      if constexpr (kMapped) announced[turn.at].wait(turn.parity);
      const Segment& s = kMapped ? segments[turn.at] : mine;
      if (s.head < 0) {
        if (kMapped && kTurns == 1 && producer == 0 && Cluster::size() > 1) wait_for_all_readers(stage);
        return;
      }
      if (!s.merge) copy_segment(p, cut, s, producer, skip, stage, maps);
      if constexpr (kMapped) {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) read[turn.at].arrive();
      }
      turn.advance();
    }
  }

 protected:
  static constexpr int kEach = kMyRows / kChunk;

  __device__ __forceinline__ void announce(const Segment& s, Turn<kSegments> turn) {
    if (threadIdx.x % kWarp == 0) {
      read[turn.at].wait(turn.parity ^ 1);
      segments[turn.at] = s;
      announced[turn.at].arrive();
    }
    __syncwarp();
  }

  // A producer's rows of all tiles of a segment.
  __device__ __forceinline__ void copy_segment(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                               int producer, int& skip, Turn<kStages>& stage, const PoolMaps* maps) {
    if (producer == 0 && !kMapped) ask_for_queries(p, cut, s);
    if (producer == 1) ask_for_lookups(p, cut, s);
    const int my_first = producer % kTeam * kMyRows, end_tile = s.end_tile;
    const int lane = hold(threadIdx.x % kWarp);  // here and below: a producer has little time for a tile
    // Before its begin pages may be freed.
    const Span range{visible_begin(p, s.request, cut.group.div(s.first_row)), s.request.end};
    int tile = s.first_tile + skip;
    Pages pages = find_pages(p, cut, s, range, lane, tile * kTokens + my_first);
#pragma unroll 1
    for (; tile < end_tile; tile += kTurns, stage.advance_by(kTurns)) {
      const int first = tile * kTokens + my_first;
      if constexpr (kMapped) {
        if (maps->usable && copy_boxes(p, cut, s, *maps, range, lane, first, my_first, stage, pages)) {
          if (tile + kTurns < end_tile) pages = find_pages(p, cut, s, range, lane, first + kTurns * kTokens);
          continue;
        }
      }
      const Rows now = find_rows(p, cut, s, range, first, pages);
      if (tile + kTurns < end_tile) pages = find_pages(p, cut, s, range, lane, first + kTurns * kTokens);
      Stage& to = stages[stage.at];
      empty[stage.at].wait(stage.parity ^ 1);  // the first round is empty
      copy(p.k_pool, to.k, my_first, now.k, now.there);
      if constexpr (kMapped) {
        tell(stage.at, my_first, now);
        empty_v[stage.at].wait(stage.parity ^ 1);
      }
      copy(p.v_pool, to.v, my_first, now.v, now.there);
      if constexpr (kMapped)
        full_v[stage.at].arrive_after_copies();
      else
        tell(stage.at, my_first, now);
    }
    skip = tile - end_tile;
  }

  // Of a producer's rows lane % kChunk, that + kChunk, ...: the table's entries, -1 outside the range. Nothing is
  // computed from them when they are asked for, so that the tile before is copied while they come.
  struct Pages {
    int page[kEach];
  };
  __device__ static Pages find_pages(const TreeAttentionParams& p, const Cut& cut, const Segment& s, Span range,
                                     int lane, int first) {
    Pages pages;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = first + n * kChunk + lane % kChunk;
      pages.page[n] = -1;
      if (row >= range.begin && row < range.end)  // which is no more than the table has
        pages.page[n] = __ldg(p.rows.page_table + s.request.slot * p.rows.max_pages + cut.page_size.div(row));
    }
    return pages;
  }

  // Asks the query rows of a segment into the L2: consumers need them at once when they come to it.
  __device__ static void ask_for_queries(const TreeAttentionParams& p, const Cut& cut, const Segment& s) {
    const int lane = threadIdx.x % kWarp, end = s.request.valid_rows * cut.group.divisor;
    const int first = s.first_row + static_cast<int>(blockIdx.x) % cut.lanes * cut.rows;
    const char* q = static_cast<const char*>(p.q);
#pragma unroll 1
    for (int n = first + lane; n < min(first + cut.rows, end); n += kWarp) {
      const QueryRow at = query_row(cut, s.head, n);
      const char* row = q + 2 * (s.request.q_start + at.row * p.q_strides.row + at.head * p.q_strides.head);
      for (int byte = 0; byte < 2 * p.head_dim; byte += 128) prefetch(row + byte);
    }
  }
  // And what its tiles look up one by one: the page table's entries, as far as one line for each lane reaches, and the
  // mask.
  __device__ static void ask_for_lookups(const TreeAttentionParams& p, const Cut& cut, const Segment& s) {
    const int lane = threadIdx.x % kWarp, page = cut.page_size.div(s.first_tile * kTokens) + lane * 32;
    if (page <= cut.page_size.div(min(s.end_tile * kTokens, s.request.end) - 1))
      prefetch(p.rows.page_table + s.request.slot * p.rows.max_pages + page);
    if (p.mask != nullptr)
      for (int64_t n = lane * 16; n < s.request.valid_rows * p.mask_words; n += kWarp * 16)
        prefetch(p.mask + s.request.flat_row * p.mask_words + n);
  }

  // Of the same rows: where they begin in their pools, in 16 bytes; 0 for those that are not `there`.
  struct Rows {
    uint32_t k[kEach], v[kEach], there[kEach];

    __device__ void tell(uint16_t* to, int n) const {
#pragma unroll
      for (int i = 0; i < kChunk / 16; ++i) to[i] = static_cast<uint16_t>(there[n] >> 16 * i);
    }
  };
  __device__ static Rows find_rows(const TreeAttentionParams& p, const Cut& cut, const Segment& s, Span range,
                                   int first, const Pages& pages) {
    Rows rows;
    const int lane = threadIdx.x % kWarp, mine = lane % kChunk, bytes = kRowBytes / static_cast<int>(p.head_dim);
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = first + n * kChunk + mine;
      KvRow at;
      at.page = pages.page[n];
      at.offset = cut.page_size.rem(row);
      bool there = at.page >= 0 && at.page < p.rows.num_pages;
      if (!there && row >= range.begin && row < range.end) set_status(p.status, s.request.slot, kBadPage);
      // What no row of the request sees may not have been written: it is not read.
      if (p.mask != nullptr && first + (n + 1) * kChunk > s.request.prefix) {
        uint32_t seen = 0;
#pragma unroll 1
        for (int i = lane; i < s.request.valid_rows; i += kWarp)
          seen |= static_cast<uint32_t>(visible_word(p, s.request, i, first + n * kChunk));
        there &= __reduce_or_sync(kFullMask, seen) >> mine & 1;
      }
      rows.there[n] = __ballot_sync(kFullMask, there);
      rows.k[n] = there ? static_cast<uint32_t>(row_start(p.k_strides, at, s.head) * bytes / 16) : 0;
      rows.v[n] = there ? static_cast<uint32_t>(row_start(p.v_strides, at, s.head) * bytes / 16) : 0;
    }
    return rows;
  }

  // A warp's rows of a tile by the copy engine: where all of them lie in the prefix, in pages of whole boxes.
  __device__ __forceinline__ bool copy_boxes(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                             const PoolMaps& maps, Span range, int lane, int first, int my_first,
                                             Turn<kStages> stage, const Pages& pages) {
    constexpr int kPanels = kRowBytes / Stage::kLine;
    bool whole = first >= range.begin && first + kMyRows <= s.request.prefix;
#pragma unroll
    for (int n = 0; n < kEach; ++n) whole &= pages.page[n] >= 0 && pages.page[n] < p.rows.num_pages;
    if (!__all_sync(kFullMask, whole)) return false;
    // Two blocks of a cluster start every second one each, for both.
    const bool pair = Cluster::size() == 2;
    const int panel = lane % kMapRows, row = my_first + lane / kMapRows * kMapRows, head = s.head;
    const bool mine = lane < kChunk && panel < kPanels &&
                      (!pair || (panel + lane / kMapRows) % 2 == static_cast<int>(Cluster::rank()));
    const int column = panel * static_cast<int>(p.head_dim) / kPanels;
    int inside[kEach];  // of a page
#pragma unroll
    for (int n = 0; n < kEach; ++n) inside[n] = hold(cut.page_size.rem(first + row - my_first + n * kChunk));
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
      for (int n = 0; n < kMyRows / 16; ++n) there[stage.at][my_first / 16 + n] = 0xffff;
      full[stage.at].arrive_expecting(kWarp + 1, kMyRows * kRowBytes);
    }
    __syncwarp();
    start(full[stage.at], maps.k, stages[stage.at].k);
    empty_v[stage.at].wait(stage.parity ^ 1);
    if (lane == 0) full_v[stage.at].arrive_expecting(kWarp, kMyRows * kRowBytes);
    __syncwarp();
    start(full_v[stage.at], maps.v, stages[stage.at].v);
    return true;
  }

  // The other block of a cluster counts its readers in here: this one has to stay until it has.
  __device__ void wait_for_all_readers(Turn<kStages> stage) {
#pragma unroll 1
    for (int n = 0; n < kStages; ++n, stage.advance()) {
      empty[stage.at].wait(stage.parity ^ 1);
      empty_v[stage.at].wait(stage.parity ^ 1);
    }
  }

  // The rows copied so far are what `full` waits for.
  __device__ __forceinline__ void tell(int stage, int my_first, const Rows& rows) {
    full[stage].arrive_after_copies();
    if (threadIdx.x % kWarp != 0) return;
#pragma unroll
    for (int n = 0; n < kEach; ++n) rows.tell(there[stage] + (my_first + n * kChunk) / 16, n);
    full[stage].arrive();
  }

  // Zeros where there is no row: whatever is stored there must not be met, even with weight 0.
  __device__ __forceinline__ static void copy(const void* from, unsigned char* to, int my_first,
                                              const uint32_t (&starts)[kEach], const uint32_t (&there)[kEach]) {
    constexpr int kPieces = kRowBytes / 16, kRowsAtOnce = kWarp / kPieces;
    // Of a warp's copies: their addresses are ready before the first is needed.
    constexpr int kBatch = kChunk / kRowsAtOnce < 8 ? kChunk / kRowsAtOnce : 8;
    static_assert(kPieces <= kWarp);
    const int lane = threadIdx.x % kWarp, my_row = lane / kPieces, piece = lane % kPieces;
    const uint32_t my_to =
        static_cast<uint32_t>(__cvta_generic_to_shared(to)) + Stage::offset(my_row, piece) + my_first * Stage::kLine;
    const char* pool = static_cast<const char*>(from) + piece * 16;
    asm volatile("" : "+l"(pool));  // one sum, not one for each copy
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const uint32_t missing = ~there[n] >> my_row;
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

}  // namespace specdec
