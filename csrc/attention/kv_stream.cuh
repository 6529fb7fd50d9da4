// The KV of a worker's share as a stream of tiles through shared memory. Two warps produce it, one K and one V: they walk
// the work line, look up pages one tile ahead and copy rows with cp.async, 16 bytes at a time, so that every page size and any
// strides are one path and a row of one head (128 bytes or more) is whole sectors anyway. The other warps consume it and
// free each stage when they are done with it; only barriers of a stage connect them.
#pragma once

#include "attention/work_line.cuh"
#include "core/mbarrier.cuh"

namespace specdec {

// K and V of a tile are kept in panels of 128 bytes of every row: byte c of row j lies in panel c / 128 at
// 128 j + (c % 128 ^ (j % 8 * 16)). That is the swizzle which ldmatrix reads without bank conflicts and which the
// tensor cores of Hopper read themselves (128 bytes, K-major for K, MN-major for V).
template <int kTokens, int kRowBytes>
struct Stage {
  static constexpr int kPanel = kTokens * 128;  // bytes
  static_assert(kRowBytes % 128 == 0);

  unsigned char k[kTokens * kRowBytes];
  unsigned char v[kTokens * kRowBytes];

  // Of 16-byte piece `piece` of row `row`.
  __device__ static constexpr int offset(int row, int piece) {
    return piece / 8 * kPanel + row * 128 + ((piece ^ row) % 8) * 16;
  }
};

template <int kTokens_, int kRowBytes_, int kStages_, int kConsumers_>
struct KvStream {
  static constexpr int kTokens = kTokens_, kRowBytes = kRowBytes_, kStages = kStages_;
  static constexpr int kConsumers = kConsumers_;    // warps
  static constexpr int kSegments = kStages + 1;     // that the stages' tiles may belong to, and the one before them
  static constexpr int kProducers = 2;              // warps
  static constexpr int kWords = kTokens / 64;
  static_assert(kTokens % 64 == 0);
  using Stage = specdec::Stage<kTokens, kRowBytes>;

  alignas(1024) Stage stages[kStages];
  uint64_t there[kStages][kWords];  // bit j: row j of the tile is on a page
  Segment segments[kSegments];
  Mbarrier full[kStages], empty[kStages], announced[kSegments];

  // By one thread, before the block's first barrier.
  __device__ void init() {
    for (int s = 0; s < kStages; ++s) {
      full[s].init(kProducers * kWarp + 1);
      empty[s].init(kConsumers);
    }
    for (int s = 0; s < kSegments; ++s) announced[s].init(1);
  }

  // A producer warp's whole life; number 0 copies K, number 1 V. The last segment announced has head -1.
  __device__ void produce(const TreeAttentionParams& p, const Cut& cut, int worker, int number) {
    const int lane = threadIdx.x % kWarp;
    const PoolStrides& strides = number == 0 ? p.k_strides : p.v_strides;
    const char* pool = static_cast<const char*>(number == 0 ? p.k_pool : p.v_pool);
    Segment s;
    s.head = -1;
    WorkLine line(p, cut);
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
    int stage = 0;
    unsigned free_parity = 1;  // the first round of stages is free
    int slot = 0;
    while (true) {
      // Nobody reads the slot any more: its last segment is more than kStages tiles back, and the tile loaded last
      // waited until the one kStages before it was released.
      if (number == 0 && lane == 0) {
        segments[slot] = s;
        announced[slot].arrive();
      }
      if (s.head < 0) return;
      slot = slot + 1 == kSegments ? 0 : slot + 1;

      Pages pages = find_pages(p, cut, s, s.first_tile);
      for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
        const Rows rows = find_rows(p, cut, strides, s, tile, pages);
        if (tile + 1 < s.end_tile) pages = find_pages(p, cut, s, tile + 1);
        empty[stage].wait(free_parity);
        copy(number == 0 ? stages[stage].k : stages[stage].v, pool, rows);
        full[stage].arrive_after_copies();
        if (number == 0) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            const uint64_t low = __ballot_sync(kFullMask, rows.begin[2 * w] != kNoRow);
            const uint64_t high = __ballot_sync(kFullMask, rows.begin[2 * w + 1] != kNoRow);
            if (lane == 0) there[stage][w] = low | high << 32;
          }
          if (lane == 0) full[stage].arrive();
        }
        if (++stage == kStages) {
          stage = 0;
          free_parity ^= 1;
        }
      }
      s = line.next();
    }
  }

 private:
  static constexpr uint32_t kNoRow = ~uint32_t{0};
  static constexpr int kEach = kTokens / kWarp;

  // Of rows lane, lane + 32, ... of a tile: the table's entries, -1 behind the end. Nothing is computed from them when
  // they are asked for, so that the tile before is copied while they come.
  struct Pages {
    int page[kEach];
  };
  __device__ static Pages find_pages(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                     int tile) {
    Pages pages;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = tile * kTokens + n * kWarp + threadIdx.x % kWarp;
      pages.page[n] = -1;
      if (row < s.request.end)  // which is no more than the table has
        pages.page[n] = __ldg(p.rows.page_table + s.request.slot * p.rows.max_pages + cut.page_size.div(row));
    }
    return pages;
  }

  // Of the same rows: where they begin in the pool, in 16 bytes.
  struct Rows {
    uint32_t begin[kEach];
  };
  __device__ static Rows find_rows(const TreeAttentionParams& p, const Cut& cut, const PoolStrides& strides,
                                   const Segment& s, int tile, const Pages& pages) {
    Rows rows;
    const int bytes = kRowBytes / static_cast<int>(p.head_dim);
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int row = tile * kTokens + n * kWarp + threadIdx.x % kWarp;
      KvRow at;
      at.page = pages.page[n];
      at.offset = cut.page_size.rem(row);
      const bool there = at.page >= 0 && at.page < p.rows.num_pages;
      rows.begin[n] = there ? static_cast<uint32_t>(row_start(strides, at, s.head) * bytes / 16) : kNoRow;
      if (!there && row < s.request.end) set_status(p.status, s.request.slot, kBadPage);
    }
    return rows;
  }

  // Zeros where there is no row: whatever is stored there must not be met, even with weight 0.
  __device__ __forceinline__ static void copy(unsigned char* to, const char* pool, const Rows& rows) {
    constexpr int kPieces = kRowBytes / 16, kRowsAtOnce = kWarp / kPieces;
    static_assert(kPieces <= kWarp);
    const int lane = threadIdx.x % kWarp, my_row = lane / kPieces, piece = lane % kPieces;
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(to)) + Stage::offset(my_row, piece);
    const char* source = pool + piece * 16;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
#pragma unroll 2
      for (int eight = 0; eight < kWarp; eight += 8) {
#pragma unroll
        for (int row = 0; row < 8; row += kRowsAtOnce) {  // the swizzle repeats every eight rows
          const uint32_t from = __shfl_sync(kFullMask, rows.begin[n], eight + row + my_row);
          const unsigned bytes = from == kNoRow ? 0 : 16;
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                           (base ^ row * 16) + (n * kWarp + eight + row) * 128),
                       "l"(source + (from == kNoRow ? 0 : from * int64_t{16})), "r"(bytes)
                       : "memory");
        }
      }
    }
  }
};

}  // namespace specdec
