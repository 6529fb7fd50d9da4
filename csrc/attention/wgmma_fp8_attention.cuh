// tree_attention of 8-bit pools with wgmma (compute capability 9.0): 16, 32 or 64 rows of a KV head. wgmma takes one
// factor from registers, and that is where 8-bit floats become Half: so it is the keys and values that are the rows of
// a product, scores = k q^T and out = v^T weights, and each is converted once for all query rows. Of a consumer
// warpgroup each warp has a quarter of a tile's tokens and then of the dimensions. Two of them hide each other's
// waiting: one in each of two blocks of a multiprocessor, or both in one block, each with every second tile, where
// there are too few groups for two blocks. Two producer warps a block, or four. Grid: lanes x max_workers blocks.
// Bytes: the KV of each request once per `lanes` row tiles.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90.hpp>

#include "attention/fp8_rows.cuh"
#include "attention/launch.h"
#include "attention/merge_parts.cuh"
#include "attention/mma_operands.cuh"
#include "core/hold.cuh"
#include "core/wgmma.cuh"

namespace specdec {

// Two groups get a tile in the time in which a warp finds out about its rows, be they 16 or 64: so producers take
// turns.
template <int D, int kRows, int kGroups>
using Fp8Stream = std::conditional_t<
    kGroups == 2, KvStream<kWgmmaFp8Tokens, D, 2 * (D == 256 ? 5 : 640 / D), 8, 4, true, 0, 4, kRows == 64 ? 2 : 4>,
    KvStream<kWgmmaFp8Tokens, D, D == 256 ? 5 : 640 / D, 4, 2>>;

template <class T, int D, int kRows, int kGroups>
class WgmmaFp8Attention : Fp8Rows<T, D, kRows, Fp8Stream<D, kRows, kGroups>> {
  using Base = Fp8Rows<T, D, kRows, Fp8Stream<D, kRows, kGroups>>;

 public:
  using Stream = Fp8Stream<D, kRows, kGroups>;
  using Base::kConsumers;
  using typename Base::Shared;
  static constexpr int kBlocks = D == 256 || kGroups == 2 ? 1 : 2;  // that a multiprocessor has room for
  static constexpr int kThreads = (kConsumers + Stream::kProducers) * kWarp;
  static constexpr bool kPairs = false;
  static constexpr bool kMovesRegisters = kGroups == 2;  // of which threads start with too few
  static constexpr bool kAhead = kMovesRegisters;        // keys become Half while the values before are multiplied
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;

  __device__ WgmmaFp8Attention(Shared& shared, const TreeAttentionParams& p, const Cut& cut, int lane_of_worker)
      : Base(shared, p, cut, lane_of_worker), stream_(shared.stream) {}

  // A consumer warp's whole life.
  __device__ void consume() {
    Turn<Stream::kSegments> turn;
    wait_for_kernels_before();
    write_unseen_rows<T, D, kConsumers * kWarp>(p_, cut_);
    while (true) {
      stream_.announced[turn.at].wait(turn.parity);
      const Segment& s = stream_.segments[turn.at];
      if (s.head < 0) return;
      if (s.merge)
        merge_group<T, D, kConsumers * kWarp>(p_, cut_, s, lane_of_worker_, sync_consumers);
      else
        do_segment(s);
      __syncwarp();
      if (lane_ == 0) stream_.read[turn.at].arrive();
      turn.advance();
    }
  }

 private:
  using Base::kGroupThreads, Base::kHalves, Base::sync_consumers;
  using Base::shared_, Base::p_, Base::cut_, Base::lane_of_worker_;
  using Base::warp_, Base::lane_, Base::group_warp_, Base::group_thread_, Base::group_;
  using typename Base::Operands, typename Base::QueryTile, typename Base::WeightTile, typename Base::RowState;
  using typename Base::Out, typename Base::Sums;
  using MultiplyK = Wgmma<Half, kRows, cute::SM90::GMMA::Major::K>;
  using MultiplyV = Wgmma<Half, kRows, cute::SM90::GMMA::Major::MN>;
  static constexpr float kSlack = 8;  // as WarpRows has it

  // ldmatrix takes 32 tokens by 16 dimensions at once, or 16 by 32.
  static constexpr int kAtOnce = kHalves == 1 ? 32 : 16, kBeside = kHalves == 1 ? 1 : kHalves / 2;

  // A lane has tokens lane / 4 and + 8 of its warp's 16, and of every 8 rows lane % 4 * 2 and the next one.
  using Scores = float[kRows / 8][4];
  using Fragments = uint32_t[D / 16][4];  // of 64 tokens' K or V, as rows of a product

  __device__ void do_segment(const Segment& s) {
    const int first_row = s.first_row + lane_of_worker_ * kRows, end_tile = s.end_tile;
    this->load_q(s, first_row);
    Out out;
    Sums sums;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      sums[n][0] = sums[n][1] = 0;
#pragma unroll
      for (int m = 0; m < kHalves; ++m) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0;
    }
    Fragments of_keys, of_values{};
    Fragments& values = of_values;
    Fragments& keys = kAhead ? of_keys : of_values;
    uint64_t there = 0;  // which rows of the tile are
    int tile = s.first_tile + group_;
    Place place{tiles_ + group_};
    if (kAhead && tile < end_tile) there = take_keys(place, keys, out);
    // Scores, weights, and what the values add, which is multiplied while the next tile's keys come.
    while (tile < end_tile) {
      if (!kAhead) there = take_keys(place, keys, out);
      Scores scores, powers;
      multiply_k(keys, values, out, scores);
      if (p_.soft_cap != 0) [[unlikely]]
        cap(scores);
      // All rows see all of the tile, unless it is of the tail, before some row's window, or not all there.
      const int64_t first = int64_t{tile} * Stream::kTokens;
      if (~there || first + Stream::kTokens > s.request.prefix || first < s.request.end - p_.window) [[unlikely]]
        hide(s, first_row, first, there, scores);
      if (sync_group_or(relate(scores, powers))) [[unlikely]] {  // behind it nobody reads the weights before
        raise(scores, sums, out);
        relate(scores, powers);
      }
      uint32_t raw[8 * kHalves];
      take_values(place, raw);
      weigh(powers, sums);
      widen_v(raw, values);
      show_to_wgmma();
      sync_group();
      add_v(values, out);
      tile += kGroups;
      place.tile += kGroups;
      if (kAhead && tile < end_tile) there = take_keys(place, keys, out);
    }
    tiles_ += end_tile - s.first_tile;
    cute::warpgroup_wait<0>();
    pin_out(out);
    this->write(s, first_row, sums, out);
    if (s.parts > 1 && s.last) leave_part<D>(p_, cut_, s, lane_of_worker_, sync_consumers);
  }

  __device__ void sync_group() const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier_), "n"(kGroupThreads) : "memory");
  }
  __device__ bool sync_group_or(bool any) const {
    uint32_t result;
    asm volatile(
        "{\n.reg .pred mine, all;\nsetp.ne.u32 mine, %1, 0;\nbarrier.cta.red.or.pred all, %2, %3, mine;\n"
        "selp.u32 %0, 1, 0, all;\n}"
        : "=r"(result)
        : "r"(static_cast<uint32_t>(any)), "r"(barrier_), "n"(kGroupThreads)
        : "memory");
    return result;
  }
  __device__ static void pin_out(Out& out) {
#pragma unroll
    for (auto& o : out) specdec::pin(o);
  }
  template <int N>
  __device__ static void pin(uint32_t (&x)[N]) {
#pragma unroll
    for (uint32_t& y : x) cute::warpgroup_fence_operand(y);
  }
  __device__ static void pin_fragments(Fragments& fragments) {
#pragma unroll
    for (auto& f : fragments) pin(f);
  }

  // Where a tile is in the ring, which all groups' tiles go through.
  struct Place {
    unsigned tile;  // of all
    __device__ int at() const { return static_cast<int>(tile % Stream::kStages); }
    __device__ unsigned parity() const { return tile / Stream::kStages & 1; }
  };

  // A tile's keys, when they are there; and which of its rows are. If registers are to be had, while the values before
  // are multiplied.
  __device__ __forceinline__ uint64_t take_keys(Place place, Fragments& keys, Out& out) {
    const int at = place.at();
    stream_.full[at].wait(place.parity());
    const typename Stream::Stage& kv = stream_.stages[at];
    const uint64_t there = stream_.rows_there(at, 0);
    uint4 x[2][Operands::kPieces];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < Operands::kPieces; ++i)
        x[h][i] =
            *reinterpret_cast<const uint4*>(kv.k + (keys_at_ ^ i % 2 * 16) + i / 2 * kv.kPanel + h * 8 * kv.kLine);
    if constexpr (Stream::kApart) leave(stream_.empty[at]);
    if constexpr (!kAhead) {
      cute::warpgroup_wait<0>();
      pin_out(out);
      pin_fragments(keys);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < Operands::kPieces; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) widen((&x[h][i].x)[j], keys[4 * i + j][h], keys[4 * i + j][2 + h]);
    return there;
  }

  // Its values, as they are.
  __device__ __forceinline__ void take_values(Place place, uint32_t (&x)[8 * kHalves]) {
    const int at = place.at();
    if constexpr (Stream::kApart) stream_.full_v[at].wait(place.parity());
    load_v(stream_.stages[at], x);
    leave(Stream::kApart ? stream_.empty_v[at] : stream_.empty[at]);
  }

  // When all lanes have read what a stage has.
  __device__ void leave(Mbarrier& empty) const {
    __syncwarp();
    if (lane_ == 0) empty.arrive();
  }

  // scores = k q^T. Waits for the products before.
  __device__ __forceinline__ void multiply_k(Fragments& keys, Fragments& values, Out& out, Scores& scores) const {
    const uint64_t q = wgmma_operand(shared_.q, 0);
    if constexpr (kAhead) {
      cute::warpgroup_wait<0>();
      pin_out(out);
      pin_fragments(values);
    }
    pin_fragments(keys);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      MultiplyK::multiply(keys[k], q + ((k / 4 * QueryTile::kPanel + k % 4 * 32) >> 4), k > 0, scores);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    specdec::pin(scores);
    pin_fragments(keys);
  }

  // 64 tokens of this warp's 16 kHalves dimensions, as MmaOperands has them.
  __device__ __forceinline__ void load_v(const typename Stream::Stage& kv, uint32_t (&x)[8 * kHalves]) const {
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i)
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(kv.v + (values_at_ ^ i % kBeside * 32) +
                                                                              i / kBeside * kAtOnce * kv.kLine),
                                    x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
  // Rows of the product are the even dimensions of 16, then the odd ones.
  __device__ __forceinline__ static void widen_v(const uint32_t (&x)[8 * kHalves], Fragments& fragments) {
#pragma unroll
    for (int i = 0; i < 8 * kHalves; ++i)
      widen(__byte_perm(x[i], 0, 0x3120), fragments[i / 2][i % 2 * 2], fragments[i / 2][i % 2 * 2 + 1]);
  }

  // out += v^T weights; not waited for.
  __device__ __forceinline__ void add_v(Fragments& fragments, Out& out) const {
    const uint64_t b = wgmma_operand<WeightTile::kLine>(shared_.weights[group_], 0);
    pin_fragments(fragments);
    pin_out(out);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4 * kHalves; ++i)
      MultiplyV::multiply(fragments[i], b + ((i / kHalves * 16 * WeightTile::kLine) >> 4), true, out[i % kHalves]);
    cute::warpgroup_commit_batch();
  }

  // Of this lane's rows 8 n + lane % 4 * 2 and the next one: maximum, scale, maximum, scale.
  __device__ __forceinline__ float4 state_of(int n) const {
    return *reinterpret_cast<const float4*>(&shared_.state[group_][8 * n + lane_ % 4 * 2]);
  }

  __device__ __forceinline__ void cap(Scores& scores) const {
    const float inverse = 1 / p_.soft_cap;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scale = shared_.before_cap[8 * n + lane_ % 4 * 2 + e % 2];
        scores[n][e] = p_.soft_cap * tanh_fast(scores[n][e] * (scale * inverse));
      }
  }

  __device__ void hide(const Segment& s, int first_row, int64_t first, uint64_t there, Scores& scores) {
    if (group_thread_ < kRows) {
      const int last = s.request.valid_rows * cut_.group.divisor - 1;
      const int i = cut_.group.div(min(first_row + group_thread_, last));
      shared_.seen[group_][group_thread_] = visible_word(p_, s.request, i, first) & there;
    }
    sync_group();
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint64_t mine = shared_.seen[group_][8 * n + lane_ % 4 * 2 + c] >> (16 * group_warp_ + lane_ / 4);
        if (!(mine & 1)) scores[n][c] = -INFINITY;
        if (!(mine & 1 << 8)) scores[n][2 + c] = -INFINITY;
      }
  }

  // Scores in powers of two, less their rows' maxima; returns whether one is far above.
  __device__ __forceinline__ bool relate(const Scores& scores, Scores& powers) const {
    float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float4 s = state_of(n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        powers[n][e] = fmaf(scores[n][e], e % 2 ? s.w : s.y, e % 2 ? -s.z : -s.x);
        top[e] = fmaxf(top[e], powers[n][e]);
      }
    }
    return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])) > kSlack;
  }

  // Writes the weights and adds them to `sums`.
  __device__ __forceinline__ void weigh(const Scores& powers, Sums& sums) const {
#pragma unroll
    for (int n = 0; n < kRows / 8; n += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = exp2_fast(powers[n + k][e]);
        sums[n + k][0] += x[0] + x[2];
        sums[n + k][1] += x[1] + x[3];
        packed[2 * k] = pack<Half>(x[0], x[1]);
        packed[2 * k + 1] = pack<Half>(x[2], x[3]);
      }
      cute::SM90_U32x4_STSM_N::copy(
          packed[0], packed[1], packed[2], packed[3],
          *reinterpret_cast<cute::uint128_t*>(shared_.weights[group_] + (weights_at_ ^ n * 16)));
    }
  }

  // Raises the maximum of rows with a score far above it, and brings their sums to it: each row by itself.
  __device__ void raise(const Scores& scores, Sums& sums, Out& out) {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = fmaxf(scores[n][c], scores[n][2 + c]);
        for (int step = 4; step < kWarp; step *= 2) top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
        if (lane_ < 4) shared_.of_warps[warp_][8 * n + lane_ % 4 * 2 + c] = top;
      }
    sync_group();
    if (group_thread_ < kRows) {
      RowState& state = shared_.state[group_][group_thread_];
      const float scale = state.scale;
      float top = -INFINITY;
      for (int w = 4 * group_; w < 4 * group_ + 4; ++w) top = fmaxf(top, shared_.of_warps[w][group_thread_]);
      const bool rises = fmaf(top, scale, -state.max) > kSlack;
      shared_.factor[group_][group_thread_] = rises ? exp2_fast(state.max - top * scale) : 1;
      if (rises) state.max = top * scale;
    }
    sync_group();
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float factor = shared_.factor[group_][8 * n + lane_ % 4 * 2 + c];
        sums[n][c] *= factor;
#pragma unroll
        for (int m = 0; m < kHalves; ++m) out[m][n][c] *= factor, out[m][n][2 + c] *= factor;
      }
  }

  Stream& stream_;
  const int barrier_ = kGroups == 1 ? 1 : 2 + group_;
  // Of this lane, in a tile's keys, its values, and the weights.
  const int keys_at_ = hold(Stream::Stage::offset(16 * group_warp_ + lane_ / 4, Operands::piece_of_lane(0)));
  const int values_at_ = hold(Stream::Stage::offset(lane_ % kAtOnce, kHalves* group_warp_ + lane_ / kAtOnce));
  const int weights_at_ = hold(WeightTile::offset(16 * group_warp_ + lane_ % 16, lane_ / 16));
  unsigned tiles_ = 0;  // of the segments before
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocks)
    wgmma_fp8_attention_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut,
                               const __grid_constant__ PoolMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) shared.stream.init();
  __syncthreads();
  const int worker = blockIdx.x / cut.lanes, lane_of_worker = blockIdx.x % cut.lanes;
  if (threadIdx.x / kWarp < Attention::kConsumers) {
    if constexpr (Attention::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<Attention::kConsumerRegisters>();
    Attention(shared, p, cut, lane_of_worker).consume();
  } else {
    if constexpr (Attention::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<Attention::kProducerRegisters>();
    shared.stream.produce(p, cut, worker, &maps);
  }
#endif
}

template <class T, int D, int kRows, int kGroups>
void start_wgmma_fp8_attention(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  using Attention = WgmmaFp8Attention<T, D, kRows, kGroups>;
  start_on_tensor_cores<Attention>(wgmma_fp8_attention_kernel<Attention>, p, cut, stream, pool_maps_of(p));
}

// Of one head dimension; defined in a file of its own for each, so that they compile side by side.
template <int D>
void wgmma_fp8_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    const auto start = [&]<int kRows>() {
      if constexpr (D < 256)
        if (cut.two_groups) return start_wgmma_fp8_attention<T, D, kRows, 2>(p, cut, stream);
      start_wgmma_fp8_attention<T, D, kRows, 1>(p, cut, stream);
    };
    if (cut.rows == 16) return start.template operator()<16>();
    if (cut.rows == 32) return start.template operator()<32>();
    if constexpr (D < 256) start_wgmma_fp8_attention<T, D, 64, 2>(p, cut, stream);
  });
}

}  // namespace specdec
