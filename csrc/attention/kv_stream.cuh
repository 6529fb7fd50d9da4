// The KV of a worker's share as a stream of tiles through shared memory. A few warps produce it, since one alone starts
// a copy every 60 cycles only: each walks the work line, looks up its rows' pages one tile ahead and copies rows with
// cp.async, 16 bytes at a time, so that every page size and any strides are one path and a row of one head (128 bytes
// or more) is whole sectors anyway. The other warps consume it and free each stage when they are done with it; only
// barriers connect them.
#pragma once

#include "attention/work_line.cuh"
#include "core/mbarrier.cuh"

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

// Which of kCount things used in turn it is, and the parity of its barrier's phase.
template <int kCount>
struct Turn {
  int at = 0;
  unsigned parity = 0;
  __device__ void advance() {
    if (++at == kCount) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Warps 0 to kConsumers - 1 of the block consume, the next kProducers produce.
template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_, int kProducers_>
struct KvStream {
  static constexpr int kTokens = kTokens_, kRowBytes = kRowBytes_, kStages = kStages_;
  static constexpr int kConsumers = kConsumers_, kProducers = kProducers_;
  static constexpr int kSegments = kStages;                         // as many as their tiles may belong to
  static constexpr int kMyRows = kTokens / kProducers;              // of a tile, a producer's
  static constexpr int kChunk = kMyRows < kWarp ? kMyRows : kWarp;  // rows that a warp looks up at once
  static_assert(kTokens % 64 == 0 && kMyRows % kChunk == 0 && kChunk % 16 == 0);
  using Stage = specdec::Stage<kTokens, kRowBytes>;

  alignas(1024) Stage stages[kStages];
  alignas(8) uint16_t there[kStages][kTokens / 16];  // bit j: row j of these 16 is on a page and seen by some row
  Segment segments[kSegments];
  Mbarrier full[kStages], empty[kStages], announced[kSegments], read[kSegments];

  // By one thread, before the block's first barrier.
  __device__ void init() {
    for (int s = 0; s < kStages; ++s) {
      full[s].init((kWarp + 1) * kProducers);
      empty[s].init(kConsumers);
    }
    for (int s = 0; s < kSegments; ++s) {
      announced[s].init(1);
      read[s].init(kConsumers);
    }
  }

  // Bit j: row 64 word + j of the stage's tile is there.
  __device__ uint64_t rows_there(int stage, int word) const {
    return reinterpret_cast<const uint64_t*>(there[stage])[word];
  }

  // A producer warp's whole life. Behind the segments of its share come those to be merged, and at last one of head -1.
  __device__ void produce(const TreeAttentionParams& p, const Cut& cut, int worker) {
    const int lane = threadIdx.x % kWarp, my_first = (threadIdx.x / kWarp - kConsumers) * kMyRows;
    WorkLine line(p, cut);
    Turn<kSegments> turn;
    Turn<kStages> stage;
    // The first pass is made while kernels before may still change what it reads. In a chain of calls they rarely do,
    // and then it has not to be made again. All of it is written once: code has to be fetched too.
    bool waited = false, known = false;
    bool cut_some = false, merging = false;  // merges come when all of the share is done
#pragma unroll 1
    while (true) {
      if (!known) {
        line.measure();
        line.seek(worker);
      }
      Segment s = line.next();
      if (!waited) {
        wait_for_kernels_before();
        let_next_kernel_start();
        waited = true;
        if (!line.holds()) continue;
      }
      known = true;
      if (s.head < 0 && cut_some && !merging) {
        merging = true;
        line.seek(worker);
        continue;
      }
      cut_some |= s.head >= 0 && s.parts > 1;
      s.merge = merging;
      if (merging && s.head >= 0 && (s.parts == 1 || !s.last)) continue;
      if (lane == 0 && my_first == 0) {
        read[turn.at].wait(turn.parity ^ 1);
        segments[turn.at] = s;
        announced[turn.at].arrive();
      }
      if (s.head < 0) return;
      turn.advance();
      if (merging) continue;
      if (my_first == 0) ask_for_queries(p, cut, s);
      if (my_first == kMyRows) ask_for_pages(p, cut, s);
      const int begin = visible_begin(p, s.request, cut.group.div(s.first_row));  // before it pages may be freed
      const Span range{begin, s.request.end};
      Pages pages = find_pages(p, cut, s, range, s.first_tile * kTokens + my_first);
      for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
        const int first = tile * kTokens + my_first;
        const Rows now = find_rows(p, cut, s, range, first, pages);
        if (tile + 1 < s.end_tile) pages = find_pages(p, cut, s, range, first + kTokens);
        empty[stage.at].wait(stage.parity ^ 1);  // the first round is empty
        copy(p, stages[stage.at], my_first, now);
        full[stage.at].arrive_after_copies();
        if (lane == 0) {
#pragma unroll
          for (int n = 0; n < kEach; ++n) now.tell(there[stage.at] + (my_first + n * kChunk) / 16, n);
          full[stage.at].arrive();
        }
        stage.advance();
      }
    }
  }

 protected:
  static constexpr int kEach = kMyRows / kChunk;

  // Of a producer's rows lane % kChunk, that + kChunk, ...: the table's entries, -1 outside the range. Nothing is
  // computed from them when they are asked for, so that the tile before is copied while they come.
  struct Pages {
    int page[kEach];
  };
  __device__ static Pages find_pages(const TreeAttentionParams& p, const Cut& cut, const Segment& s, Span range,
                                     int first) {
    Pages pages;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = first + n * kChunk + threadIdx.x % kChunk;
      pages.page[n] = -1;
      if (row >= range.begin && row < range.end)  // which is no more than the table has
        pages.page[n] = __ldg(p.rows.page_table + s.request.slot * p.rows.max_pages + cut.page_size.div(row));
    }
    return pages;
  }

  // Asks the query rows of a segment and their mask into the L2: consumers need them at once when they come to it.
  __device__ static void ask_for_queries(const TreeAttentionParams& p, const Cut& cut, const Segment& s) {
    const int lane = threadIdx.x % kWarp, end = s.request.valid_rows * cut.group.divisor;
    const int first = s.first_row + static_cast<int>(blockIdx.x) % cut.lanes * cut.rows;
    const char* q = static_cast<const char*>(p.q);
#pragma unroll 1
    for (int n = first + lane; n < min(first + cut.rows, end); n += kWarp) {
      const QueryRow at = query_row(cut, s.head, n);
      const char* row = q + 2 * (s.request.q_start + at.row * p.q_strides.row + at.head * p.q_strides.head);
      for (int byte = 0; byte < 2 * p.head_dim; byte += 128) ask(row + byte);
    }
    if (p.mask != nullptr)
      for (int64_t n = lane * 16; n < s.request.valid_rows * p.mask_words; n += kWarp * 16)
        ask(p.mask + s.request.flat_row * p.mask_words + n);
  }
  // Asks the page table's entries for it, as far as one line for each lane reaches: tiles look them up one by one.
  __device__ static void ask_for_pages(const TreeAttentionParams& p, const Cut& cut, const Segment& s) {
    const int page = cut.page_size.div(s.first_tile * kTokens) + threadIdx.x % kWarp * 32;
    if (page <= cut.page_size.div(min(s.end_tile * kTokens, s.request.end) - 1))
      ask(p.rows.page_table + s.request.slot * p.rows.max_pages + page);
  }
  __device__ static void ask(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

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

  // Zeros where there is no row: whatever is stored there must not be met, even with weight 0.
  __device__ __forceinline__ static void copy(const TreeAttentionParams& p, Stage& to, int my_first, const Rows& rows) {
    constexpr int kPieces = kRowBytes / 16, kRowsAtOnce = kWarp / kPieces;
    constexpr int kBatch = 4;  // of a warp's copies of K and of V: their addresses are ready before the first is needed
    static_assert(kPieces <= kWarp);
    const int lane = threadIdx.x % kWarp, my_row = lane / kPieces, piece = lane % kPieces;
    const uint32_t k =
        static_cast<uint32_t>(__cvta_generic_to_shared(to.k)) + Stage::offset(my_row, piece) + my_first * Stage::kLine;
    constexpr uint32_t kToV = kTokens * kRowBytes;
    const char* k_pool = static_cast<const char*>(p.k_pool) + piece * 16;
    const char* v_pool = static_cast<const char*>(p.v_pool) + piece * 16;
    asm volatile("" : "+l"(k_pool), "+l"(v_pool));  // one sum, not one for each copy
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const uint32_t missing = ~rows.there[n] >> my_row;
#pragma unroll
      for (int begin = 0; begin < kChunk; begin += kBatch * kRowsAtOnce) {
        const char *k_from[kBatch], *v_from[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int row = begin + i * kRowsAtOnce + my_row;
          k_from[i] = k_pool + __shfl_sync(kFullMask, rows.k[n], row) * int64_t{16};
          v_from[i] = v_pool + __shfl_sync(kFullMask, rows.v[n], row) * int64_t{16};
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int row = begin + i * kRowsAtOnce;
          const unsigned bytes = missing & 1u << row ? 0 : 16;
          const uint32_t k_to = (k ^ Stage::swizzle(row)) + (n * kChunk + row) * Stage::kLine;
          copy_16(k_to, k_from[i], bytes);
          copy_16(k_to + kToV, v_from[i], bytes);
        }
      }
    }
  }
  __device__ __forceinline__ static void copy_16(uint32_t to, const char* from, unsigned bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
};

}  // namespace specdec
