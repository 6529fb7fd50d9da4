// 8-bit pools that are dequantised in shared memory: a KvRing brings tiles as they are, and two more warps turn them
// into the tiles that a pool of Half would have given. Half holds every 8-bit float and NaN.
#pragma once

#include "attention/common/kv_ring.cuh"
#include "attention/common/mma_operands.cuh"
#include "core/wgmma.cuh"

namespace specdec::attention {

constexpr int kDequantisers = 2;  // warps

// Stores 16 numbers of 8 bits in shared memory as Half: pieces 2 n and 2 n + 1 of a token.
template <class Stage>
__device__ __forceinline__ void store_dequantised(uint4 x, unsigned char* to, int row, int n) {
  uint4 low, high;
  dequantise(x.x, low.x, low.y);
  dequantise(x.y, low.z, low.w);
  dequantise(x.z, high.x, high.y);
  dequantise(x.w, high.z, high.w);
  const int at = Stage::offset(row, 2 * n);
  *reinterpret_cast<uint4*>(to + at) = low;
  *reinterpret_cast<uint4*>(to + (at ^ 16)) = high;
}

// The dequantised tiles, which start on 1024 bytes. K and V of a tile come and go each for itself: K of the next tile
// is dequantised while V is still multiplied.
template <int kTokens, int D, int kKeys_, int kValues_>
struct DequantTiles {
  static constexpr int kKeys = kKeys_, kValues = kValues_;
  static_assert((kKeys & (kKeys - 1)) == 0 && (kValues & (kValues - 1)) == 0);
  alignas(128) unsigned char k[kKeys][kTokens * 2 * D];
  unsigned char v[kValues][kTokens * 2 * D];

  __device__ const unsigned char* keys(int at) const { return k[at]; }
  __device__ const unsigned char* values(int at) const { return v[at]; }
};

// The barriers of those tiles.
template <class Tiles, int kTokens, int D, int kConsumers>
struct DequantBarriers {
  static constexpr bool kApart = true;
  static constexpr int kKeys = Tiles::kKeys, kValues = Tiles::kValues;
  using Stage = attention::Stage<kTokens, 2 * D>;

  alignas(8) uint16_t present[kKeys][kTokens / 16];  // as a KvRing has it
  Mbarrier full[kKeys], empty[kKeys], full_v[kValues], empty_v[kValues];

  // By one thread, before the block's first barrier.
  __device__ void init() {
    for (int s = 0; s < kKeys; ++s) {
      full[s].init(kDequantisers);
      empty[s].init(kConsumers);
    }
    for (int s = 0; s < kValues; ++s) {
      full_v[s].init(kDequantisers);
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
    __device__ Turn<kKeys> key() const { return {static_cast<int>(tile % kKeys), tile / kKeys & 1}; }
    __device__ Turn<kValues> value() const { return {static_cast<int>(tile % kValues), tile / kValues & 1}; }
  };

  // By a dequantising warp: its tokens of the next tile of `quantised`.
  template <class Quantised>
  __device__ __forceinline__ void dequantise_tile(int dequantiser, Quantised& quantised, Turn<Quantised::kStages>& from,
                                                  Tiles& tiles, Turn<kKeys>& to, Turn<kValues>& to_v) {
    const int first = dequantiser * kMyTokens;
    auto& source = quantised.stages[from.at];
    quantised.full[from.at].wait(from.parity);
    empty[to.at].wait(to.parity ^ 1);  // the first round finds all stages empty
    if (threadIdx.x % kWarp < kMyTokens / 16) {
      const int n = first / 16 + static_cast<int>(threadIdx.x) % kWarp;
      present[to.at][n] = quantised.present[from.at][n];
    }
    dequantise_tokens(source.k, tiles.k[to.at], first, [&] {
      if constexpr (Quantised::kApart) release(quantised.empty[from.at]);
    });
    publish(full[to.at]);
    if constexpr (Quantised::kApart) quantised.full_v[from.at].wait(from.parity);
    empty_v[to_v.at].wait(to_v.parity ^ 1);
    dequantise_tokens(source.v, tiles.v[to_v.at], first, [&] {
      if constexpr (Quantised::kApart)
        release(quantised.empty_v[from.at]);
      else
        release(quantised.empty[from.at]);
    });
    publish(full_v[to_v.at]);
    from.advance();
    to.advance();
    to_v.advance();
  }

 private:
  static constexpr int kMyTokens = kTokens / kDequantisers;

  // Publishes what all lanes have written. The writers show it to wgmma, so that consumers need not.
  __device__ static void publish(Mbarrier& barrier) {
    show_to_wgmma();
    release(barrier);
  }

  // Arrives once all lanes have done what comes before.
  __device__ static void release(Mbarrier& barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier.arrive();
  }

  // Four lanes take 64 numbers of a token, and the lanes of two tokens take different halves of a line: so neither
  // reading 16 bytes a lane nor writing twice as many meets a bank twice. Calls read() when everything has been read.
  template <class Read>
  __device__ __forceinline__ static void dequantise_tokens(const unsigned char* from, unsigned char* to, int first,
                                                           Read&& read) {
    using Quantised = attention::Stage<kTokens, D>;
    constexpr int kPasses = D / 64, kCount = kMyTokens / 8 * kPasses, kBatch = kCount < 8 ? kCount : 8;
    const int lane = threadIdx.x % kWarp, row = first + lane / 4;
    const auto piece = [&](int pass) { return lane % 4 + 4 * (kPasses == 1 ? 0 : pass ^ (row & 1)); };
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kBatch) {
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        x[i] = *reinterpret_cast<const uint4*>(from + Quantised::offset(row, piece((begin + i) % kPasses)) +
                                               (begin + i) / kPasses * 8 * Quantised::kLine);
      if (begin + kBatch == kCount) read();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        unsigned char* const place = to + (begin + i) / kPasses * 8 * Stage::kLine;
        store_dequantised<Stage>(x[i], place, row, piece((begin + i) % kPasses));
      }
    }
  }
};

// Both, for a persistent grid: kConsumers warps of the block consume, the next two produce, the last two dequantise.
template <int kTokens, int D, int kKeys_, int kValues_, int kQuantisedStages, int kConsumers>
struct alignas(1024) DequantRing : DequantTiles<kTokens, D, kKeys_, kValues_>,
                                   KvRing<kTokens, D, kQuantisedStages, kConsumers, 2, true, kDequantisers>,
                                   DequantBarriers<DequantTiles<kTokens, D, kKeys_, kValues_>, kTokens, D, kConsumers> {
  using Tiles = DequantTiles<kTokens, D, kKeys_, kValues_>;
  using Quantised = KvRing<kTokens, D, kQuantisedStages, kConsumers, 2, true, kDequantisers>;
  using Dequantised = DequantBarriers<Tiles, kTokens, D, kConsumers>;
  using Dequantised::kApart, Dequantised::kKeys, Dequantised::kValues, Dequantised::full, Dequantised::full_v,
      Dequantised::empty, Dequantised::empty_v, Dequantised::present_tokens;
  using Tiles::keys, Tiles::values;
  using typename Dequantised::Stage, typename Dequantised::Cursor;

  // By one thread, before the block's first barrier.
  __device__ void init() {
    Dequantised::init();
    Quantised::init();
  }

  // The whole life of a dequantising warp.
  __device__ void dequantise_all() {
    Turn<Quantised::kSegments> turn;
    Turn<kQuantisedStages> from;
    Turn<kKeys> to;
    Turn<kValues> to_v;
    const int dequantiser = static_cast<int>(threadIdx.x) / kWarp - kConsumers - Quantised::kProducers;
#pragma unroll 1
    while (true) {
      this->announced[turn.at].wait(turn.parity);
      const Segment& s = this->segments[turn.at];
      if (s.kv_head < 0) return;
      int tiles = s.merge ? 0 : s.end_tile - s.first_tile;
      __syncwarp();
      if (threadIdx.x % kWarp == 0) this->read[turn.at].arrive();
      turn.advance();
#pragma unroll 1
      for (; tiles > 0; --tiles)
        Dequantised::dequantise_tile(dequantiser, static_cast<Quantised&>(*this), from, static_cast<Tiles&>(*this), to,
                                     to_v);
    }
  }
};

// Makes Half of 16 rows of BFloat16 in shared memory, by a warp: brings each row into the range of Half by a power of
// two, which keeps all bits that matter. Returns the factors of the scores of rows lane / 4 and + 8.
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
