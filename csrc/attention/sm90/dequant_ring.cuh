// KV pipeline for FP8 pools that are dequantized in shared memory: a KvRing brings FP8 tiles, and two more warps
// convert them to Half tiles with the layout of a 16-bit pool. Half represents every e4m3 value and NaN exactly.
#pragma once

#include "attention/common/kv_ring.cuh"
#include "attention/common/mma_operands.cuh"
#include "core/wgmma.cuh"

namespace specdec::attention {

constexpr int kDequantizers = 2;  // warps

// Store 16 FP8 values in shared memory as Half: 16-byte pieces 2 n and 2 n + 1 of a token.
template <class Stage>
__device__ __forceinline__ void store_dequantized(uint4 x, unsigned char* to, int row, int n) {
  uint4 low, high;
  dequantize(x.x, low.x, low.y);
  dequantize(x.y, low.z, low.w);
  dequantize(x.z, high.x, high.y);
  dequantize(x.w, high.z, high.w);
  const int at = Stage::offset(row, 2 * n);
  *reinterpret_cast<uint4*>(to + at) = low;
  *reinterpret_cast<uint4*>(to + (at ^ 16)) = high;
}

// The dequantized tiles, aligned to 1024 bytes. K and V of a tile are filled and released separately: K of the next
// tile is dequantized while V is still being multiplied.
template <int kTokens, int D, int kKStages_, int kVStages_>
struct DequantTiles {
  static constexpr int kKStages = kKStages_, kVStages = kVStages_;
  static_assert((kKStages & (kKStages - 1)) == 0 && (kVStages & (kVStages - 1)) == 0);
  alignas(128) unsigned char k[kKStages][kTokens * 2 * D];
  unsigned char v[kVStages][kTokens * 2 * D];

  __device__ const unsigned char* keys(int at) const { return k[at]; }
  __device__ const unsigned char* values(int at) const { return v[at]; }
};

// Barriers of the dequantized tiles.
template <class Tiles, int kTokens, int D, int kConsumers>
struct DequantBarriers {
  static constexpr bool kSeparateKv = true;
  static constexpr int kKStages = Tiles::kKStages, kVStages = Tiles::kVStages;
  using Stage = attention::Stage<kTokens, 2 * D>;

  alignas(8) uint16_t present[kKStages][kTokens / 16];  // as in KvRing
  Mbarrier full[kKStages], empty[kKStages], full_v[kVStages], empty_v[kVStages];

  // Initialize the barriers. Call from one thread, before the block's first __syncthreads().
  __device__ void init() {
    for (int s = 0; s < kKStages; ++s) {
      full[s].init(kDequantizers);
      empty[s].init(kConsumers);
    }
    for (int s = 0; s < kVStages; ++s) {
      full_v[s].init(kDequantizers);
      empty_v[s].init(kConsumers);
    }
  }

  __device__ uint64_t present_tokens(int stage, int word) const {
    return reinterpret_cast<const uint64_t*>(present[stage])[word];
  }

  // A consumer's position in the ring.
  struct Cursor {
    unsigned tile = 0;  // counts all tiles
    __device__ void advance() { ++tile; }
    __device__ Turn<kKStages> key() const { return {static_cast<int>(tile % kKStages), tile / kKStages & 1}; }
    __device__ Turn<kVStages> value() const { return {static_cast<int>(tile % kVStages), tile / kVStages & 1}; }
  };

  // Dequantize this warp's tokens of the next tile of `quantized`. Call from a dequantizer warp.
  template <class Quantized>
  __device__ __forceinline__ void dequantize_tile(int dequantizer, Quantized& quantized, Turn<Quantized::kStages>& from,
                                                  Tiles& tiles, Turn<kKStages>& to, Turn<kVStages>& to_v) {
    const int first = dequantizer * kMyTokens;
    auto& source = quantized.stages[from.at];
    quantized.full[from.at].wait(from.parity);
    empty[to.at].wait(to.parity ^ 1);  // passes at once in the first round: all stages start empty
    if (threadIdx.x % kWarp < kMyTokens / 16) {
      const int n = first / 16 + static_cast<int>(threadIdx.x) % kWarp;
      present[to.at][n] = quantized.present[from.at][n];
    }
    dequantize_tokens(source.k, tiles.k[to.at], first, [&] {
      if constexpr (Quantized::kSeparateKv) release(quantized.empty[from.at]);
    });
    publish(full[to.at]);
    if constexpr (Quantized::kSeparateKv) quantized.full_v[from.at].wait(from.parity);
    empty_v[to_v.at].wait(to_v.parity ^ 1);
    dequantize_tokens(source.v, tiles.v[to_v.at], first, [&] {
      if constexpr (Quantized::kSeparateKv)
        release(quantized.empty_v[from.at]);
      else
        release(quantized.empty[from.at]);
    });
    publish(full_v[to_v.at]);
    from.advance();
    to.advance();
    to_v.advance();
  }

 private:
  static constexpr int kMyTokens = kTokens / kDequantizers;

  // Publish what all lanes have written. The writers issue the async-proxy fence, so that the consumers need not.
  __device__ static void publish(Mbarrier& barrier) {
    fence_for_wgmma();
    release(barrier);
  }

  // Arrive once all lanes have completed their preceding accesses.
  __device__ static void release(Mbarrier& barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier.arrive();
  }

  // Dequantize tokens of a tile. Four lanes take 64 values of a token, and the lanes of two tokens take different
  // halves of a line, so that neither 16-byte reads nor the writes, which are twice as large, have bank conflicts. Call
  // on_read() once everything has been read.
  template <class OnRead>
  __device__ __forceinline__ static void dequantize_tokens(const unsigned char* from, unsigned char* to, int first,
                                                           OnRead&& on_read) {
    using Quantized = attention::Stage<kTokens, D>;
    constexpr int kPasses = D / 64, kCount = kMyTokens / 8 * kPasses, kBatch = kCount < 8 ? kCount : 8;
    const int lane = threadIdx.x % kWarp, row = first + lane / 4;
    const auto piece = [&](int pass) { return lane % 4 + 4 * (kPasses == 1 ? 0 : pass ^ (row & 1)); };
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kBatch) {
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        x[i] = *reinterpret_cast<const uint4*>(from + Quantized::offset(row, piece((begin + i) % kPasses)) +
                                               (begin + i) / kPasses * 8 * Quantized::kLine);
      if (begin + kBatch == kCount) on_read();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        unsigned char* const place = to + (begin + i) / kPasses * 8 * Stage::kLine;
        store_dequantized<Stage>(x[i], place, row, piece((begin + i) % kPasses));
      }
    }
  }
};

// Combine both for a persistent grid: kConsumers warps of the block consume, the next two produce, the last two
// dequantize.
template <int kTokens, int D, int kKStages_, int kVStages_, int kQuantizedStages, int kConsumers>
struct alignas(1024) DequantRing
    : DequantTiles<kTokens, D, kKStages_, kVStages_>,
      KvRing<kTokens, D, kQuantizedStages, kConsumers, 2, true, kDequantizers>,
      DequantBarriers<DequantTiles<kTokens, D, kKStages_, kVStages_>, kTokens, D, kConsumers> {
  using Tiles = DequantTiles<kTokens, D, kKStages_, kVStages_>;
  using Quantized = KvRing<kTokens, D, kQuantizedStages, kConsumers, 2, true, kDequantizers>;
  using Dequantized = DequantBarriers<Tiles, kTokens, D, kConsumers>;
  using Dequantized::kSeparateKv, Dequantized::kKStages, Dequantized::kVStages, Dequantized::full, Dequantized::full_v,
      Dequantized::empty, Dequantized::empty_v, Dequantized::present_tokens;
  using Tiles::keys, Tiles::values;
  using typename Dequantized::Stage, typename Dequantized::Cursor;

  // Initialize the barriers. Call from one thread, before the block's first __syncthreads().
  __device__ void init() {
    Dequantized::init();
    Quantized::init();
  }

  // Run a dequantizer warp from start to end.
  __device__ void dequantize_all() {
    Turn<Quantized::kSegments> turn;
    Turn<kQuantizedStages> from;
    Turn<kKStages> to;
    Turn<kVStages> to_v;
    const int dequantizer = static_cast<int>(threadIdx.x) / kWarp - kConsumers - Quantized::kProducers;
#pragma unroll 1
    while (true) {
      this->segment_full[turn.at].wait(turn.parity);
      const Segment& s = this->segments[turn.at];
      if (s.kv_head < 0) return;
      int tiles = s.merge ? 0 : s.end_tile - s.first_tile;
      __syncwarp();
      if (threadIdx.x % kWarp == 0) this->segment_empty[turn.at].arrive();
      turn.advance();
#pragma unroll 1
      for (; tiles > 0; --tiles)
        Dequantized::dequantize_tile(dequantizer, static_cast<Quantized&>(*this), from, static_cast<Tiles&>(*this), to,
                                     to_v);
    }
  }
};

// Convert 16 rows of BFloat16 in shared memory to Half, with one warp. Scale each row into the range of Half by a power
// of two, which keeps all significant bits. Return the scale factors of the scores of rows lane / 4 and + 8.
template <int D, class QueryTile>
__device__ __forceinline__ Scale scale_to_half(unsigned char* q, int first_row, float scale) {
  constexpr int kPieces = D / 32;  // 16-byte pieces of one row that a lane has
  const int lane = threadIdx.x % kWarp;
  Scale scales;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + lane / 4 + 8 * h;
    const auto place = [&](int i) {
      return reinterpret_cast<uint4*>(q + QueryTile::offset(row, lane % 4 + 4 * (i ^ (row & 1))));
    };
    uint4 x[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) x[i] = *place(i);
    scales.of[h] = scale * scale_to_half(reinterpret_cast<uint32_t (&)[4 * kPieces]>(x));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) *place(i) = x[i];
  }
  return scales;
}

}  // namespace specdec::attention
