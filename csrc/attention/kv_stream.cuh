// The KV of a worker's share as a stream of tiles through shared memory. One warp produces it: it walks the work line,
// looks up pages one tile ahead and copies rows with cp.async, 16 bytes at a time, so that every page size and any
// strides are one path and a row of one head (128 bytes or more) is whole sectors anyway. The other warps consume it and
// free each stage when they are done with it; only barriers of a stage connect them.
#pragma once

#include <cutlass/fast_math.h>

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
      full[s].init(kWarp + 1);
      empty[s].init(kConsumers);
    }
    for (int s = 0; s < kSegments; ++s) announced[s].init(1);
  }

  // The producer warp's whole life. The last segment that it announces has head -1.
  __device__ void produce(const TreeAttentionParams& p, const Cut& cut, const cutlass::FastDivmod& page_size, int worker) {
    const int lane = threadIdx.x % kWarp;
    WorkLine line(p, cut);
    Segment s;
    s.head = -1;
    if (worker < line.workers()) {
      line.seek(worker);
      s = line.next();
    }
    int stage = 0;
    unsigned free_parity = 1;  // the first round of stages is free
    int slot = 0;
    while (true) {
      // Nobody reads the slot any more: its last segment is more than kStages tiles back, and the tile loaded last
      // waited until the one kStages before it was released.
      if (lane == 0) {
        segments[slot] = s;
        announced[slot].arrive();
      }
      if (s.head < 0) return;
      slot = slot + 1 == kSegments ? 0 : slot + 1;

      Rows rows = find_rows(p, page_size, s, s.first_tile);
      for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
        const Rows now = rows;
        if (tile + 1 < s.end_tile) rows = find_rows(p, page_size, s, tile + 1);
        empty[stage].wait(free_parity);
        copy(stages[stage].k, static_cast<const char*>(p.k_pool), now.k);
        copy(stages[stage].v, static_cast<const char*>(p.v_pool), now.v);
        full[stage].arrive_after_copies();
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const uint64_t low = __ballot_sync(kFullMask, now.k[2 * w] != kNoRow);
          const uint64_t high = __ballot_sync(kFullMask, now.k[2 * w + 1] != kNoRow);
          if (lane == 0) there[stage][w] = low | high << 32;
        }
        if (lane == 0) full[stage].arrive();
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
  // Of rows lane, lane + 32, ... of a tile: where they begin in their pools, in 16 bytes.
  struct Rows {
    uint32_t k[kTokens / kWarp], v[kTokens / kWarp];
  };

  __device__ static Rows find_rows(const TreeAttentionParams& p, const cutlass::FastDivmod& page_size, const Segment& s,
                                   int tile) {
    Rows rows;
    const int64_t bytes = kRowBytes / p.head_dim;
    const int end = static_cast<int>(s.request.end);
#pragma unroll
    for (int n = 0; n < kTokens / kWarp; ++n) {
      const int row = tile * kTokens + n * kWarp + threadIdx.x % kWarp;
      rows.k[n] = rows.v[n] = kNoRow;
      if (row < end) {
        const KvRow at = find_row(p.rows, page_size, s.request.slot, row);
        if (at.bits == 0) {
          rows.k[n] = static_cast<uint32_t>(row_start(p.k_strides, at, s.head) * bytes / 16);
          rows.v[n] = static_cast<uint32_t>(row_start(p.v_strides, at, s.head) * bytes / 16);
        } else {
          set_status(p.status, s.request.slot, at.bits);
        }
      }
    }
    return rows;
  }

  // Zeros where there is no row: whatever is stored there must not be met, even with weight 0.
  __device__ static void copy(unsigned char* to, const char* pool, const uint32_t (&rows)[kTokens / kWarp]) {
    constexpr int kPieces = kRowBytes / 16, kRowsAtOnce = kWarp / (kPieces < kWarp ? kPieces : kWarp);
    static_assert(kPieces <= kWarp);
    const int lane = threadIdx.x % kWarp, piece = lane % kPieces;
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(to));
#pragma unroll
    for (int n = 0; n < kTokens / kWarp; ++n) {
#pragma unroll 8
      for (int first = 0; first < kWarp; first += kRowsAtOnce) {
        const int row = first + lane / kPieces;
        const uint32_t from = __shfl_sync(kFullMask, rows[n], row);
        const unsigned bytes = from == kNoRow ? 0 : 16;
        const char* source = pool + (from == kNoRow ? 0 : (static_cast<int64_t>(from) + piece) * 16);
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         base + Stage::offset(n * kWarp + row, piece)),
                     "l"(source), "r"(bytes)
                     : "memory");
      }
    }
  }
};

}  // namespace specdec
