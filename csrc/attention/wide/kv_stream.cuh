// The KV of a worker's share as a stream of tiles (attention/kv_stream.cuh), for wide row tiles.
#pragma once

#include "attention/kv_stream.cuh"
#include "attention/wide/work_line.cuh"

namespace specdec::wide {

// Warps 0 to kConsumers - 1 of the block consume, the next kProducers produce.
template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_, int kProducers_>
struct KvStream {
  static constexpr int kTokens = kTokens_, kRowBytes = kRowBytes_, kStages = kStages_;
  static constexpr int kConsumers = kConsumers_, kProducers = kProducers_;
  static constexpr int kSegments =
      kStages + 2;  // that the stages' tiles may belong to, the one before and the next one
  static constexpr int kMyRows = kTokens / kProducers;  // of a tile, a producer's
  static_assert(kTokens % 64 == 0 && kMyRows % kWarp == 0);
  using Stage = specdec::Stage<kTokens, kRowBytes>;

  alignas(1024) Stage stages[kStages];
  uint32_t there[kStages][kTokens / kWarp];  // bit j: row j of these 32 is on a page and seen by some row
  Segment segments[kSegments];
  Mbarrier full[kStages], empty[kStages], announced[kSegments];

  // By one thread, before the block's first barrier.
  __device__ void init() {
    for (int s = 0; s < kStages; ++s) {
      full[s].init((kWarp + 1) * kProducers);
      empty[s].init(kConsumers);
    }
    for (int s = 0; s < kSegments; ++s) announced[s].init(1);
  }

  // Bit j: row 64 word + j of the stage's tile is there.
  __device__ uint64_t rows_there(int stage, int word) const {
    return there[stage][2 * word] | uint64_t{there[stage][2 * word + 1]} << 32;
  }

  // A producer warp's whole life. The last segment that is announced has head -1.
  __device__ void produce(const TreeAttentionParams& p, const Cut& cut, int worker) {
    const int lane = threadIdx.x % kWarp, my_first = (threadIdx.x / kWarp - kConsumers) * kMyRows;
    WorkLine line(p, cut);
    Segment s;
    s.head = -1;
    s.parts = 0;
    // The first pass, made while kernels before may still change what it reads, does nothing but fetch the code.
#pragma unroll 1
    for (bool rehearsal : {true, false}) {
      line.measure();
      if (worker < line.workers()) {
        line.seek(worker);
        s = line.next();
      }
      if (rehearsal) {
        wait_for_kernels_before();
        let_next_kernel_start();
      }
    }
    Turn<kSegments> turn;
    Turn<kStages> stage;
    bool told = false;  // which group begins in this share and goes on in the next one
    while (true) {
      // Nobody reads the slot any more: a tile of the segment behind its last one has been released, since the tile
      // loaded last waited for the one kStages before it.
      if (lane == 0 && my_first == 0) {
        segments[turn.at] = s;
        announced[turn.at].arrive();
        if (blockIdx.x % cut.lanes == 0 && (s.parts > 0 || (s.head < 0 && !told))) {
          cut_groups(p)[worker] = s;
          told = true;
        }
      }
      if (s.head < 0) return;
      turn.advance();
      const int begin = visible_begin(p, s.request, cut.group.div(s.first_row));  // before it pages may be freed
      Pages pages = find_pages(p, cut, s, begin, s.first_tile * kTokens + my_first);
      for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
        const int first = tile * kTokens + my_first;
        const Rows now = find_rows(p, cut, s, begin, first, pages);
        if (tile + 1 < s.end_tile) pages = find_pages(p, cut, s, begin, first + kTokens);
        empty[stage.at].wait(stage.parity ^ 1);  // the first round is empty
        copy(p, stages[stage.at], my_first, now);
        full[stage.at].arrive_after_copies();
        if (lane == 0) {
#pragma unroll
          for (int n = 0; n < kEach; ++n) there[stage.at][my_first / kWarp + n] = now.there[n];
          full[stage.at].arrive();
        }
        stage.advance();
      }
      s = line.next();
    }
  }

 private:
  static constexpr int kEach = kMyRows / kWarp;

  // Of a producer's rows lane, lane + 32, ...: the table's entries, -1 behind the end. Nothing is computed from them
  // when they are asked for, so that the tile before is copied while they come.
  struct Pages {
    int page[kEach];
  };
  __device__ static Pages find_pages(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int begin,
                                     int first) {
    Pages pages;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = first + n * kWarp + threadIdx.x % kWarp;
      pages.page[n] = -1;
      if (row >= begin && row < s.request.end)  // which is no more than the table has
        pages.page[n] = __ldg(p.rows.page_table + s.request.slot * p.rows.max_pages + cut.page_size.div(row));
    }
    return pages;
  }

  // Of the same rows: where they begin in their pools, in 16 bytes; 0 for those that are not `there`.
  struct Rows {
    uint32_t k[kEach], v[kEach], there[kEach];
  };
  __device__ static Rows find_rows(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int begin, int first,
                                   const Pages& pages) {
    Rows rows;
    const int lane = threadIdx.x % kWarp, bytes = kRowBytes / static_cast<int>(p.head_dim);
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = first + n * kWarp + lane;
      KvRow at;
      at.page = pages.page[n];
      at.offset = cut.page_size.rem(row);
      bool there = at.page >= 0 && at.page < p.rows.num_pages;
      if (!there && row >= begin && row < s.request.end) set_status(p.status, s.request.slot, kBadPage);
      // What no row of the request sees may not have been written: it is not read.
      if (p.mask != nullptr && first + (n + 1) * kWarp > s.request.prefix) {
        uint32_t seen = 0;
#pragma unroll 1
        for (int i = lane; i < s.request.valid_rows; i += kWarp)
          seen |= static_cast<uint32_t>(visible_word(p, s.request, i, first + n * kWarp));
        there &= __reduce_or_sync(kFullMask, seen) >> lane & 1;
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
        static_cast<uint32_t>(__cvta_generic_to_shared(to.k)) + Stage::offset(my_row, piece) + my_first * 128;
    constexpr uint32_t kToV = kTokens * kRowBytes;
    const char* k_pool = static_cast<const char*>(p.k_pool) + piece * 16;
    const char* v_pool = static_cast<const char*>(p.v_pool) + piece * 16;
    asm volatile("" : "+l"(k_pool), "+l"(v_pool));  // one sum, not one for each copy
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const uint32_t missing = ~rows.there[n] >> my_row;
#pragma unroll
      for (int begin = 0; begin < kWarp; begin += kBatch * kRowsAtOnce) {
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
          const uint32_t k_to = (k ^ row % 8 * 16) + (n * kWarp + row) * 128;
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

}  // namespace specdec::wide
