// tree_attention for FP8 pools with wgmma (compute capability 9.0) and dequantization in registers, for 16, 32 or 64
// rows of a KV head.
//
// wgmma takes its A operand from registers, so keys and values are the A operands: scores = k q^T and out = v^T
// weights, and each is dequantized once for all query rows. Each warp of a consumer warpgroup has a quarter of a tile's
// tokens, and then a quarter of the dimensions. Two warpgroups hide each other's latency: one in each of two blocks on
// an SM, or, with too few items for two blocks, both in one block, each with every second tile. A block has two
// producer warps, or four. Grid: row_tiles x workers persistent blocks. Traffic: the KV of each request once per work
// item.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90.hpp>

#include "attention/common/launch.cuh"
#include "attention/common/merge.cuh"
#include "attention/common/mma_operands.cuh"
#include "attention/sm90/transposed_rows.cuh"
#include "core/cuda.cuh"
#include "core/wgmma.cuh"

namespace specdec::attention {

constexpr int kDequantTileTokens = 64;  // of a KV tile

// Two warpgroups consume a tile in the time that a producer needs to look up its tokens, whether 16 or 64. So producers
// take turns at tiles.
template <int D, int kRows, int kWarpgroups>
using DequantRegistersRing = std::conditional_t<
    kWarpgroups == 2,
    KvRing<kDequantTileTokens, D, 2 * (D == 256 ? 5 : 640 / D), 8, 4, true, 0, 4, kRows == 64 ? 2 : 4>,
    KvRing<kDequantTileTokens, D, D == 256 ? 5 : 640 / D, 4, 2>>;

template <class T, int D, int kRows, int kWarpgroups>
class DequantRegistersAttention : TransposedRows<T, D, kRows, DequantRegistersRing<D, kRows, kWarpgroups>> {
  using Base = TransposedRows<T, D, kRows, DequantRegistersRing<D, kRows, kWarpgroups>>;

 public:
  using Ring = DequantRegistersRing<D, kRows, kWarpgroups>;
  using Base::kConsumers;
  using typename Base::Shared;
  static constexpr int kBlocksPerSm = D == 256 || kWarpgroups == 2 ? 1 : 2;  // that fit on an SM
  static constexpr int kThreads = (kConsumers + Ring::kProducers) * kWarp;
  static constexpr bool kMulticast = false;
  static constexpr bool kReallocatesRegisters = kWarpgroups == 2;  // the initial allocation per thread is too small
  // Dequantize the next keys while the previous values are multiplied.
  static constexpr bool kPrefetchKeys = kReallocatesRegisters;
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;

  __device__ DequantRegistersAttention(Shared& shared, const TreeAttentionParams& p, const DevicePlan& plan,
                                       int row_tile)
      : Base(shared, p, plan, row_tile), ring_(shared.ring) {}

  // Run a consumer warp from start to end.
  __device__ void consume() {
    Turn<Ring::kSegments> turn;
    wait_for_kernels_before();
    write_rows_without_kv<T, D, kConsumers * kWarp>(p_, plan_);
    while (true) {
      ring_.segment_full[turn.at].wait(turn.parity);
      const Segment& s = ring_.segments[turn.at];
      if (s.kv_head < 0) return;
      if (s.merge)
        merge_item<T, D, kConsumers * kWarp>(p_, plan_, s, row_tile_, sync_consumers);
      else
        do_segment(s);
      __syncwarp();
      if (lane_ == 0) ring_.segment_empty[turn.at].arrive();
      turn.advance();
    }
  }

 private:
  using Base::kWarpgroupThreads, Base::kDimTiles, Base::sync_consumers;
  using Base::shared_, Base::p_, Base::plan_, Base::row_tile_;
  using Base::warp_, Base::lane_, Base::warp_of_warpgroup_, Base::thread_of_warpgroup_, Base::warpgroup_;
  using typename Base::Operands, typename Base::QueryTile, typename Base::WeightTile, typename Base::RowState;
  using typename Base::Out, typename Base::Sums;
  using QkMma = Wgmma<Half, kRows, cute::SM90::GMMA::Major::K>;
  using PvMma = Wgmma<Half, kRows, cute::SM90::GMMA::Major::MN>;
  static constexpr float kRescaleThreshold = 8;  // as in OnlineSoftmax

  // ldmatrix reads 32 tokens by 16 dimensions at once, or 16 by 32.
  static constexpr int kLoadTokens = kDimTiles == 1 ? 32 : 16, kDimLoads = kDimTiles == 1 ? 1 : kDimTiles / 2;

  // A lane has tokens lane / 4 and + 8 of its warp's 16, and of every 8 rows lane % 4 * 2 and the next one.
  using Scores = float[kRows / 8][4];
  using Fragments = uint32_t[D / 16][4];  // K or V of 64 tokens as an A operand

  __device__ void do_segment(const Segment& s) {
    const int first_row = s.first_row + row_tile_ * kRows, end_tile = s.end_tile;
    this->load_q(s, first_row);
    Out out;
    Sums sums;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      sums[n][0] = sums[n][1] = 0;
#pragma unroll
      for (int m = 0; m < kDimTiles; ++m) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0;
    }
    Fragments of_keys, of_values{};
    Fragments& values = of_values;
    Fragments& keys = kPrefetchKeys ? of_keys : of_values;
    uint64_t present = 0;  // which tokens of the tile are present
    int tile = s.first_tile + warpgroup_;
    Cursor cursor{tiles_ + warpgroup_};
    if (kPrefetchKeys && tile < end_tile) present = load_keys(cursor, keys, out);
    // Per tile: scores, softmax weights, and the PV product, which runs while the next tile's keys arrive.
    while (tile < end_tile) {
      if (!kPrefetchKeys) present = load_keys(cursor, keys, out);
      Scores scores, powers;
      multiply_qk(keys, values, out, scores);
      if (p_.soft_cap != 0) [[unlikely]]
        cap(scores);
      // All rows attend to the whole tile, unless it reaches into the tail or before some row's window, or not all of
      // it is present.
      const int64_t first = int64_t{tile} * Ring::kTokens;
      if (~present || first + Ring::kTokens > s.request.prefix || first < s.request.end - p_.window) [[unlikely]]
        mask(s, first_row, first, present, scores);
      if (sync_warpgroup_or(subtract_max(scores, powers)))
          [[unlikely]] {  // after this barrier no warp reads the previous weights
        raise_max(scores, sums, out);
        subtract_max(scores, powers);
      }
      uint32_t raw[8 * kDimTiles];
      load_values(cursor, raw);
      exponentiate(powers, sums);
      dequantize_v(raw, values);
      fence_for_wgmma();
      sync_warpgroup();
      accumulate_pv(values, out);
      tile += kWarpgroups;
      cursor.tile += kWarpgroups;
      if (kPrefetchKeys && tile < end_tile) present = load_keys(cursor, keys, out);
    }
    tiles_ += end_tile - s.first_tile;
    cute::warpgroup_wait<0>();
    pin_out(out);
    this->write(s, first_row, sums, out);
    if (s.splits > 1 && s.last) publish_partial<D>(p_, plan_, s, row_tile_, sync_consumers);
  }

  __device__ void sync_warpgroup() const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier_), "n"(kWarpgroupThreads) : "memory");
  }
  __device__ bool sync_warpgroup_or(bool any) const {
    uint32_t result;
    asm volatile(
        "{\n.reg .pred mine, all;\nsetp.ne.u32 mine, %1, 0;\nbarrier.cta.red.or.pred all, %2, %3, mine;\n"
        "selp.u32 %0, 1, 0, all;\n}"
        : "=r"(result)
        : "r"(static_cast<uint32_t>(any)), "r"(barrier_), "n"(kWarpgroupThreads)
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

  // A tile's position in the ring, which the tiles of all warpgroups pass through.
  struct Cursor {
    unsigned tile;  // counts the tiles of all warpgroups
    __device__ int at() const { return static_cast<int>(tile % Ring::kStages); }
    __device__ unsigned parity() const { return tile / Ring::kStages & 1; }
  };

  // Wait for a tile's keys, read and dequantize them; return which of its tokens are present. With kPrefetchKeys, the
  // previous values are multiplied meanwhile.
  __device__ __forceinline__ uint64_t load_keys(Cursor cursor, Fragments& keys, Out& out) {
    const int at = cursor.at();
    ring_.full[at].wait(cursor.parity());
    const typename Ring::Stage& kv = ring_.stages[at];
    const uint64_t present = ring_.present_tokens(at, 0);
    uint4 x[2][Operands::kPieces];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < Operands::kPieces; ++i)
        x[h][i] =
            *reinterpret_cast<const uint4*>(kv.k + (keys_offset_ ^ i % 2 * 16) + i / 2 * kv.kPanel + h * 8 * kv.kLine);
    if constexpr (Ring::kSeparateKv) release(ring_.empty[at]);
    if constexpr (!kPrefetchKeys) {
      cute::warpgroup_wait<0>();
      pin_out(out);
      pin_fragments(keys);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < Operands::kPieces; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) dequantize((&x[h][i].x)[j], keys[4 * i + j][h], keys[4 * i + j][2 + h]);
    return present;
  }

  // Read a tile's FP8 values as stored.
  __device__ __forceinline__ void load_values(Cursor cursor, uint32_t (&x)[8 * kDimTiles]) {
    const int at = cursor.at();
    if constexpr (Ring::kSeparateKv) ring_.full_v[at].wait(cursor.parity());
    load_v(ring_.stages[at], x);
    release(Ring::kSeparateKv ? ring_.empty_v[at] : ring_.empty[at]);
  }

  // Release a stage once all lanes have read it.
  __device__ void release(Mbarrier& empty) const {
    __syncwarp();
    if (lane_ == 0) empty.arrive();
  }

  // Compute scores = k q^T, after waiting for the preceding products.
  __device__ __forceinline__ void multiply_qk(Fragments& keys, Fragments& values, Out& out, Scores& scores) const {
    const uint64_t q = wgmma_operand(shared_.q, 0);
    if constexpr (kPrefetchKeys) {
      cute::warpgroup_wait<0>();
      pin_out(out);
      pin_fragments(values);
    }
    pin_fragments(keys);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      QkMma::multiply(keys[k], q + ((k / 4 * QueryTile::kPanel + k % 4 * 32) >> 4), k > 0, scores);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    specdec::pin(scores);
    pin_fragments(keys);
  }

  // Read 64 tokens of this warp's 16 kDimTiles dimensions, in the order of MmaOperands.
  __device__ __forceinline__ void load_v(const typename Ring::Stage& kv, uint32_t (&x)[8 * kDimTiles]) const {
#pragma unroll
    for (int i = 0; i < 2 * kDimTiles; ++i)
      cute::SM75_U16x8_LDSM_T::copy(
          *reinterpret_cast<const cute::uint128_t*>(kv.v + (values_offset_ ^ i % kDimLoads * 32) +
                                                    i / kDimLoads * kLoadTokens * kv.kLine),
          x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
  // Dequantize them. The rows of the product are the even dimensions of 16, then the odd ones.
  __device__ __forceinline__ static void dequantize_v(const uint32_t (&x)[8 * kDimTiles], Fragments& fragments) {
#pragma unroll
    for (int i = 0; i < 8 * kDimTiles; ++i)
      dequantize(__byte_perm(x[i], 0, 0x3120), fragments[i / 2][i % 2 * 2], fragments[i / 2][i % 2 * 2 + 1]);
  }

  // Issue out += v^T weights, without waiting for the product.
  __device__ __forceinline__ void accumulate_pv(Fragments& fragments, Out& out) const {
    const uint64_t b = wgmma_operand<WeightTile::kLine>(shared_.weights[warpgroup_], 0);
    pin_fragments(fragments);
    pin_out(out);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4 * kDimTiles; ++i)
      PvMma::multiply(fragments[i], b + ((i / kDimTiles * 16 * WeightTile::kLine) >> 4), true, out[i % kDimTiles]);
    cute::warpgroup_commit_batch();
  }

  // Return the states of this lane's rows 8 n + lane % 4 * 2 and the next one: maximum, scale, maximum, scale.
  __device__ __forceinline__ float4 state_of(int n) const {
    return *reinterpret_cast<const float4*>(&shared_.state[warpgroup_][8 * n + lane_ % 4 * 2]);
  }

  __device__ __forceinline__ void cap(Scores& scores) const {
    const float inverse = 1 / p_.soft_cap;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scale = shared_.cap_scale[8 * n + lane_ % 4 * 2 + e % 2];
        scores[n][e] = p_.soft_cap * tanh_fast(scores[n][e] * (scale * inverse));
      }
  }

  __device__ void mask(const Segment& s, int first_row, int64_t first, uint64_t present, Scores& scores) {
    if (thread_of_warpgroup_ < kRows) {
      const int last = s.request.valid_rows * plan_.gqa_group.divisor - 1;
      const int i = plan_.gqa_group.div(min(first_row + thread_of_warpgroup_, last));
      shared_.visible[warpgroup_][thread_of_warpgroup_] = visible_word(p_, s.request, i, first) & present;
    }
    sync_warpgroup();
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint64_t mine =
            shared_.visible[warpgroup_][8 * n + lane_ % 4 * 2 + c] >> (16 * warp_of_warpgroup_ + lane_ / 4);
        if (!(mine & 1)) scores[n][c] = -INFINITY;
        if (!(mine & 1 << 8)) scores[n][2 + c] = -INFINITY;
      }
  }

  // Convert scores to log2 units and subtract their rows' maxima; return whether some score exceeds its maximum by more
  // than the rescale threshold.
  __device__ __forceinline__ bool subtract_max(const Scores& scores, Scores& powers) const {
    float tile_max[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float4 s = state_of(n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        powers[n][e] = fmaf(scores[n][e], e % 2 ? s.w : s.y, e % 2 ? -s.z : -s.x);
        tile_max[e] = fmaxf(tile_max[e], powers[n][e]);
      }
    }
    return fmaxf(fmaxf(tile_max[0], tile_max[1]), fmaxf(tile_max[2], tile_max[3])) > kRescaleThreshold;
  }

  // Compute the weights, store them in shared memory and add them to `sums`.
  __device__ __forceinline__ void exponentiate(const Scores& powers, Sums& sums) const {
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
          *reinterpret_cast<cute::uint128_t*>(shared_.weights[warpgroup_] + (weights_offset_ ^ n * 16)));
    }
  }

  // Raise the maximum of rows with a score far above it, and rescale their sums. Decided per row.
  __device__ void raise_max(const Scores& scores, Sums& sums, Out& out) {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float tile_max = fmaxf(scores[n][c], scores[n][2 + c]);
        for (int step = 4; step < kWarp; step *= 2)
          tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullMask, tile_max, step));
        if (lane_ < 4) shared_.warp_partials[warp_][8 * n + lane_ % 4 * 2 + c] = tile_max;
      }
    sync_warpgroup();
    if (thread_of_warpgroup_ < kRows) {
      RowState& state = shared_.state[warpgroup_][thread_of_warpgroup_];
      const float scale = state.scale;
      float tile_max = -INFINITY;
      for (int w = 4 * warpgroup_; w < 4 * warpgroup_ + 4; ++w)
        tile_max = fmaxf(tile_max, shared_.warp_partials[w][thread_of_warpgroup_]);
      const bool exceeds = fmaf(tile_max, scale, -state.max) > kRescaleThreshold;
      shared_.factor[warpgroup_][thread_of_warpgroup_] = exceeds ? exp2_fast(state.max - tile_max * scale) : 1;
      if (exceeds) state.max = tile_max * scale;
    }
    sync_warpgroup();
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float factor = shared_.factor[warpgroup_][8 * n + lane_ % 4 * 2 + c];
        sums[n][c] *= factor;
#pragma unroll
        for (int m = 0; m < kDimTiles; ++m) out[m][n][c] *= factor, out[m][n][2 + c] *= factor;
      }
  }

  Ring& ring_;
  const int barrier_ = kWarpgroups == 1 ? 1 : 2 + warpgroup_;
  // Where this lane reads in a tile's keys and values, and writes in the weights.
  const int keys_offset_ = hold(Ring::Stage::offset(16 * warp_of_warpgroup_ + lane_ / 4, Operands::piece_of_lane(0)));
  const int values_offset_ =
      hold(Ring::Stage::offset(lane_ % kLoadTokens, kDimTiles* warp_of_warpgroup_ + lane_ / kLoadTokens));
  const int weights_offset_ = hold(WeightTile::offset(16 * warp_of_warpgroup_ + lane_ % 16, lane_ / 16));
  unsigned tiles_ = 0;  // of the preceding segments
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocksPerSm)
    dequant_registers_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ DevicePlan plan,
                             const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) shared.ring.init();
  __syncthreads();
  const int worker = blockIdx.x / plan.row_tiles, row_tile = blockIdx.x % plan.row_tiles;
  if (threadIdx.x / kWarp < Attention::kConsumers) {
    if constexpr (Attention::kReallocatesRegisters) cutlass::arch::warpgroup_reg_alloc<Attention::kConsumerRegisters>();
    Attention(shared, p, plan, row_tile).consume();
  } else {
    if constexpr (Attention::kReallocatesRegisters)
      cutlass::arch::warpgroup_reg_dealloc<Attention::kProducerRegisters>();
    shared.ring.produce(p, plan, worker, &maps);
  }
#endif
}

template <class T, int D, int kRows, int kWarpgroups>
void launch_dequant_registers(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  using Attention = DequantRegistersAttention<T, D, kRows, kWarpgroups>;
  launch_persistent<Attention>(dequant_registers_kernel<Attention>, p, plan, stream, encode_tensor_maps(p));
}

// Instantiated by instantiations/, one file per head dimension, so that they compile in parallel.
template <int D>
void dequant_registers_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    const auto launch_rows = [&]<int kRows>() {
      if constexpr (D < 256)
        if (plan.two_warpgroups) return launch_dequant_registers<T, D, kRows, 2>(p, plan, stream);
      launch_dequant_registers<T, D, kRows, 1>(p, plan, stream);
    };
    if (plan.tile_rows == 16) return launch_rows.template operator()<16>();
    if (plan.tile_rows == 32) return launch_rows.template operator()<32>();
    if constexpr (D < 256) launch_dequant_registers<T, D, 64, 2>(p, plan, stream);
  });
}

}  // namespace specdec::attention
