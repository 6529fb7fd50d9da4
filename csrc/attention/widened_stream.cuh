// Pools of 8-bit floats for those who multiply 16 bits: a KvStream brings tiles as they are, and two more warps make of
// them, in shared memory, the tiles that a pool of Half would have given. Half holds all 8-bit floats and NaN.
#pragma once

#include "attention/kv_stream.cuh"
#include "attention/mma_operands.cuh"
#include "core/wgmma.cuh"

namespace specdec {

constexpr int kWideners = 2;  // warps

// 16 numbers of 8 bits to shared memory as Half: pieces 2 n and 2 n + 1 of a row.
template <class Stage>
__device__ __forceinline__ void store_wide(uint4 x, unsigned char* to, int row, int n) {
  uint4 low, high;
  widen(x.x, low.x, low.y);
  widen(x.y, low.z, low.w);
  widen(x.z, high.x, high.y);
  widen(x.w, high.z, high.w);
  const int at = Stage::offset(row, 2 * n);
  *reinterpret_cast<uint4*>(to + at) = low;
  *reinterpret_cast<uint4*>(to + (at ^ 16)) = high;
}

// The wide tiles, which have to start on 1024 bytes. K and V of one come and go each for itself: K of the next one is
// widened while V is still multiplied.
template <int kTokens, int D, int kKeys_, int kValues_>
struct WideTiles {
  static constexpr int kKeys = kKeys_, kValues = kValues_;
  static_assert((kKeys & (kKeys - 1)) == 0 && (kValues & (kValues - 1)) == 0);
  alignas(128) unsigned char k[kKeys][kTokens * 2 * D];
  unsigned char v[kValues][kTokens * 2 * D];

  __device__ const unsigned char* keys(int at) const { return k[at]; }
  __device__ const unsigned char* values(int at) const { return v[at]; }
};

// How they come and go.
template <class Tiles, int kTokens, int D, int kConsumers>
struct WideBarriers {
  static constexpr bool kApart = true;
  static constexpr int kKeys = Tiles::kKeys, kValues = Tiles::kValues;
  using Stage = specdec::Stage<kTokens, 2 * D>;

  alignas(8) uint16_t there[kKeys][kTokens / 16];  // as a KvStream has it
  Mbarrier full[kKeys], empty[kKeys], full_v[kValues], empty_v[kValues];

  // By one thread, before the block's first barrier.
  __device__ void init() {
    for (int s = 0; s < kKeys; ++s) {
      full[s].init(kWideners);
      empty[s].init(kConsumers);
    }
    for (int s = 0; s < kValues; ++s) {
      full_v[s].init(kWideners);
      empty_v[s].init(kConsumers);
    }
  }

  __device__ uint64_t rows_there(int stage, int word) const {
    return reinterpret_cast<const uint64_t*>(there[stage])[word];
  }

  // Where a consumer is.
  struct Place {
    unsigned tile = 0;  // of all
    __device__ void advance() { ++tile; }
    __device__ Turn<kKeys> key() const { return {static_cast<int>(tile % kKeys), tile / kKeys & 1}; }
    __device__ Turn<kValues> value() const { return {static_cast<int>(tile % kValues), tile / kValues & 1}; }
  };

  // By a widening warp: its tokens of the next tile of `narrow`.
  template <class Narrow>
  __device__ __forceinline__ void widen_tile(int widener, Narrow& narrow, Turn<Narrow::kStages>& from, Tiles& tiles,
                                             Turn<kKeys>& to, Turn<kValues>& to_v) {
    const int first = widener * kMyTokens;
    auto& source = narrow.stages[from.at];
    narrow.full[from.at].wait(from.parity);
    empty[to.at].wait(to.parity ^ 1);  // the first round is empty
    if (threadIdx.x % kWarp < kMyTokens / 16) {
      const int n = first / 16 + static_cast<int>(threadIdx.x) % kWarp;
      there[to.at][n] = narrow.there[from.at][n];
    }
    widen_rows(source.k, tiles.k[to.at], first, [&] {
      if constexpr (Narrow::kApart) release(narrow.empty[from.at]);
    });
    publish(full[to.at]);
    if constexpr (Narrow::kApart) narrow.full_v[from.at].wait(from.parity);
    empty_v[to_v.at].wait(to_v.parity ^ 1);
    widen_rows(source.v, tiles.v[to_v.at], first, [&] {
      if constexpr (Narrow::kApart)
        release(narrow.empty_v[from.at]);
      else
        release(narrow.empty[from.at]);
    });
    publish(full_v[to_v.at]);
    from.advance();
    to.advance();
    to_v.advance();
  }

 private:
  static constexpr int kMyTokens = kTokens / kWideners;

  // What all lanes have written is there for wgmma. They show it, so that consumers need not.
  __device__ static void publish(Mbarrier& barrier) {
    show_to_wgmma();
    release(barrier);
  }

  // Once all lanes have done what comes before.
  __device__ static void release(Mbarrier& barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier.arrive();
  }

  // Four lanes take 64 numbers of a row, and two rows' lanes different halves of a line: neither reading 16 bytes a
  // lane nor writing two times as many then meets a bank twice. Calls read() when all have been read.
  template <class Read>
  __device__ __forceinline__ static void widen_rows(const unsigned char* from, unsigned char* to, int first,
                                                    Read&& read) {
    using Narrow = specdec::Stage<kTokens, D>;
    constexpr int kPasses = D / 64, kCount = kMyTokens / 8 * kPasses, kBatch = kCount < 8 ? kCount : 8;
    const int lane = threadIdx.x % kWarp, row = first + lane / 4;
    const auto piece = [&](int pass) { return lane % 4 + 4 * (kPasses == 1 ? 0 : pass ^ (row & 1)); };
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kBatch) {
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        x[i] = *reinterpret_cast<const uint4*>(from + Narrow::offset(row, piece((begin + i) % kPasses)) +
                                               (begin + i) / kPasses * 8 * Narrow::kLine);
      if (begin + kBatch == kCount) read();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        unsigned char* const place = to + (begin + i) / kPasses * 8 * Stage::kLine;
        store_wide<Stage>(x[i], place, row, piece((begin + i) % kPasses));
      }
    }
  }
};

// Both, for the work line: kConsumers warps of the block consume, the next two produce, the last two widen.
template <int kTokens, int D, int kKeys_, int kValues_, int kNarrowStages, int kConsumers>
struct alignas(1024) WidenedStream : WideTiles<kTokens, D, kKeys_, kValues_>,
                                     KvStream<kTokens, D, kNarrowStages, kConsumers, 2, true, kWideners>,
                                     WideBarriers<WideTiles<kTokens, D, kKeys_, kValues_>, kTokens, D, kConsumers> {
  using Tiles = WideTiles<kTokens, D, kKeys_, kValues_>;
  using Narrow = KvStream<kTokens, D, kNarrowStages, kConsumers, 2, true, kWideners>;
  using Wide = WideBarriers<Tiles, kTokens, D, kConsumers>;
  using Tiles::keys, Tiles::values;
  using typename Wide::Stage, typename Wide::Place;
  using Wide::kApart, Wide::kKeys, Wide::kValues, Wide::full, Wide::full_v, Wide::empty, Wide::empty_v,
      Wide::rows_there;

  // By one thread, before the block's first barrier.
  __device__ void init() {
    Wide::init();
    Narrow::init();
  }

  // A widening warp's whole life.
  __device__ void widen_all() {
    Turn<Narrow::kSegments> turn;
    Turn<kNarrowStages> from;
    Turn<kKeys> to;
    Turn<kValues> to_v;
    const int widener = static_cast<int>(threadIdx.x) / kWarp - kConsumers - Narrow::kProducers;
#pragma unroll 1
    while (true) {
      this->announced[turn.at].wait(turn.parity);
      const Segment& s = this->segments[turn.at];
      if (s.head < 0) return;
      int tiles = s.merge ? 0 : s.end_tile - s.first_tile;
      __syncwarp();
      if (threadIdx.x % kWarp == 0) this->read[turn.at].arrive();
      turn.advance();
#pragma unroll 1
      for (; tiles > 0; --tiles)
        Wide::widen_tile(widener, static_cast<Narrow&>(*this), from, static_cast<Tiles&>(*this), to, to_v);
    }
  }
};

// Makes Half of 16 rows of BFloat16 in shared memory, by a warp: brings each into the range of Half by a power of two,
// which leaves all bits of what matters. Returns what the scores of rows lane / 4 and + 8 are to be multiplied by.
template <int D, class QueryTile>
__device__ __forceinline__ Scale make_half(unsigned char* q, int first_row, float scale) {
  constexpr int kPieces = D / 32;  // of 16 bytes, a lane's of one row
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
    scales.of[h] = scale * make_half(reinterpret_cast<uint32_t (&)[4 * kPieces]>(x));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) *place(i) = x[i];
  }
  return scales;
}

}  // namespace specdec
