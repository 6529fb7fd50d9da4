// tree_attention with wgmma (compute capability 9.0): one consumer warpgroup for up to 64 rows of a KV head, two for
// 128.
//
// Each warpgroup overlaps the PV product of a tile with the softmax of the next tile; two warpgroups drift apart by
// themselves, so that the tensor cores stay busy while exponentials are computed. A block has two or four producer
// warps; for FP8 pools two, and two that dequantize. Grid: row_tiles x workers persistent blocks, one or two per SM.
// Traffic: the KV of each request once per work item; the blocks of a worker walk it in step and share it in the L2.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "attention/common/kv_ring.cuh"
#include "attention/common/launch.cuh"
#include "attention/common/merge.cuh"
#include "attention/sm90/dequant_ring.cuh"
#include "core/wgmma.cuh"

namespace specdec::attention {

// T: type of query rows. Kv: type of the pools. With FP8 pools, kStages counts FP8 stages, and there are kKStages and
// kVStages dequantized tiles in addition.
template <class T, class Kv, int D, int kWarpgroups, int kTokens, int kStages, int kBlocksPerSm_, int kKStages = 0,
          int kVStages = 0>
class WgmmaAttention {
 public:
  static constexpr bool kFp8 = std::is_same_v<Kv, Float8>;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;  // that fit on an SM
  static constexpr int kWarpgroupRows = 64, kWarpgroupThreads = 128, kRows = kWarpgroups * kWarpgroupRows;
  static constexpr int kConsumers = kWarpgroups * 4, kProducers = kFp8 || kBlocksPerSm == 2 ? 2 : 4;  // warps
  static constexpr int kThreads = (kConsumers + kProducers + (kFp8 ? kDequantizers : 0)) * kWarp;
  // Three warpgroups start with 168 registers a thread and four with 128, but outputs, scores and weights take more.
  static constexpr bool kReallocatesRegisters = kWarpgroups == 2 || (kFp8 && kBlocksPerSm == 2);
  static constexpr int kConsumerRegisters = kWarpgroups == 1 ? 168 : kFp8 ? 216 : 208;
  static constexpr int kProducerRegisters = kWarpgroups == 2 && kFp8 ? 72 : 88;
  // Two blocks of a worker may form a cluster, in which each multicasts half of every tile to both. A single warpgroup
  // gets its KV just as fast from plain copies.
  static constexpr bool kMulticast = kWarpgroups == 2 && !kFp8;
  // Long prompts use 128 rows a block, and most of their tail is visible to all rows. Blocks of 64 rows lack the
  // registers to track this.
  static constexpr bool kTracksAllVisible = kWarpgroups == 2;
  static constexpr int kWords = kTokens / 64;
  static_assert(kWords <= 2);
  using Ring = std::conditional_t<kFp8, DequantRing<kTokens, D, kKStages, kVStages, kStages, kConsumers>,
                                  KvRing<kTokens, 2 * D, kStages, kConsumers, kProducers, kWarpgroups == 2>>;
  using QueryTile = Stage<kWarpgroupRows, 2 * D>;  // its k holds q

  struct Shared {
    Ring ring;
    alignas(1024) unsigned char q[kWarpgroups][kWarpgroupRows * 2 * D];
  };

  __device__ WgmmaAttention(Shared& shared, const TreeAttentionParams& p, const DevicePlan& plan, int row_tile)
      : shared_(shared), ring_(shared.ring), p_(p), plan_(plan), row_tile_(row_tile) {}

  // Run a consumer warp from start to end.
  __device__ void consume() {
    wait_for_kernels_before();
    write_rows_without_kv<T, D, kConsumers * kWarp>(p_, plan_);
    if constexpr (kMulticast) Cluster::wait();
    while (true) {
      const Segment& s = wait_for_segment();
      if (s.kv_head < 0) return;
      const int turn = turn_.at;
      turn_.advance();
      if (s.merge)
        merge_item<T, D, kConsumers * kWarp>(p_, plan_, s, row_tile_, sync_consumers);
      else
        do_segment(s);
      __syncwarp();
      if (threadIdx.x % kWarp == 0) ring_.segment_empty[turn].arrive();
    }
  }

 private:
  using Cursor = typename Ring::Cursor;
  using MmaElement = std::conditional_t<kFp8, Half, T>;  // input type of the MMA
  static constexpr bool kConvertsQ = !std::is_same_v<T, MmaElement>;
  using QkMma = Wgmma<MmaElement, kTokens, cute::SM90::GMMA::Major::K>;
  using PvMma = Wgmma<MmaElement, D, cute::SM90::GMMA::Major::MN>;
  using Scores = float[kTokens / 8][4];
  using Weights = uint32_t[kTokens / 16][4];

  // The tokens of a tile that two rows attend to.
  struct TileMask {
    bool all;
    uint64_t bits[kWords][2];
  };

  // Wait for the next segment and return it.
  __device__ const Segment& wait_for_segment() {
    ring_.segment_full[turn_.at].wait(turn_.parity);
    return ring_.segments[turn_.at];
  }

  __device__ void do_segment(const Segment& s) {
    OnlineSoftmax<D> rows;
    rows.clear();
    sum_tiles(s, rows);
    write(s, rows);
    if (s.splits > 1 && s.last) publish_partial<D>(p_, plan_, s, row_tile_, sync_consumers);
  }

  __device__ void sum_tiles(const Segment& s, OnlineSoftmax<D>& rows) {
    if (!q_load_started_) begin_load_q(s);
    finish_load_q();
    if constexpr (kTracksAllVisible) {
      const int last = s.request.valid_rows * plan_.gqa_group.divisor - 1, row = min(first_row(s), last);
      all_visible_begin_ = all_visible_begin(p_, s.request, plan_.gqa_group.div(min(row + kWarpgroupRows - 1, last)));
      all_visible_end_ = all_visible_end(p_, s.request, plan_.gqa_group.div(row));
    }
    Scores scores;
    Weights weights;
    int tile = s.first_tile;
    const int end_tile = s.end_tile;
    wait_for_k();
    cute::warpgroup_arrive();
    multiply_qk(scores);
    TileMask visible = tile_mask_of(s, tile);
    cute::warpgroup_wait<0>();
    pin(scores);
    release_k();
    rows.rescale(softmax(visible, scores, rows));
    pack_weights<MmaElement>(scores, weights);

    while (++tile < end_tile) {
      const Cursor before = cursor_;
      cursor_.advance();
      wait_for_v(before);
      wait_for_k();
      pin(rows.out);
      cute::warpgroup_arrive();
      multiply_qk(scores);
      accumulate_pv(before, weights, rows);
      visible = tile_mask_of(s, tile);
      cute::warpgroup_wait<1>();
      pin(scores);
      release_k();
      const auto rescale_by = softmax(visible, scores, rows);
      // Never true, but the compiler cannot know it, and would otherwise wait for the products before it computes
      // exponentials. (With one warpgroup, this check would make it wait for each product.)
      if constexpr (kWarpgroups == 2)
        if (rows.sum[0] < 0 || rows.sum[1] < 0) __trap();
      cute::warpgroup_wait<0>();
      pin(rows.out);
      pin(scores);  // frees the registers of the weights
      release_v(before);
      rows.rescale(rescale_by);
      pack_weights<MmaElement>(scores, weights);
    }
    wait_for_v(cursor_);
    pin(rows.out);
    cute::warpgroup_arrive();
    accumulate_pv(cursor_, weights, rows);
    const Segment& next = wait_for_segment();
    q_load_started_ = next.kv_head >= 0 && !next.merge;
    if (q_load_started_) begin_load_q(next);
    cute::warpgroup_wait<0>();
    pin(rows.out);
    release_v(cursor_);
    cursor_.advance();
    rows.finish();
  }

  __device__ static void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * kWarp) : "memory"); }
  __device__ void sync_warpgroup() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kWarpgroups == 1 ? 1 : 2 + warpgroup_), "n"(kWarpgroupThreads) : "memory");
  }

  // K and V of a tile share a barrier unless the ring separates them. Dequantizer warps have already issued the
  // async-proxy fence for their tiles.
  __device__ void wait_for_k() const {
    const auto at = cursor_.key();
    ring_.full[at.at].wait(at.parity);
    if constexpr (!kFp8) fence_for_wgmma();
  }
  __device__ void wait_for_v(Cursor cursor) const {
    if constexpr (Ring::kSeparateKv) {
      const auto at = cursor.value();
      ring_.full_v[at.at].wait(at.parity);
      if constexpr (!kFp8) fence_for_wgmma();
    }
  }
  __device__ void release_k() const {
    if constexpr (kFp8) __syncwarp();
    if constexpr (Ring::kSeparateKv) release(ring_.empty[cursor_.key().at]);
  }
  __device__ void release_v(Cursor cursor) const {
    if constexpr (Ring::kSeparateKv)
      release(ring_.empty_v[cursor.value().at]);
    else
      release(ring_.empty[cursor.value().at]);
  }
  // Release a stage in both blocks of a cluster, since both write to it.
  __device__ void release(Mbarrier& empty) const {
    if constexpr (kMulticast)
      empty.arrive_at_each(threadIdx.x % kWarp, blocks_);
    else if (threadIdx.x % kWarp == 0)
      empty.arrive();
  }

  // Return the warpgroup's first row in a segment.
  __device__ int first_row(const Segment& s) const {
    return s.first_row + row_tile_ * kRows + warpgroup_ * kWarpgroupRows;
  }

  // Start loading the warpgroup's rows of q, with zeros past the request.
  __device__ void begin_load_q(const Segment& s) {
    constexpr int kPieces = D / 8;
    const int first = first_row(s), end = s.request.valid_rows * plan_.gqa_group.divisor;
    const T* q = static_cast<const T*>(p_.q) + s.request.q_start;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared_.q[warpgroup_]));
    sync_warpgroup();  // no warp reads the rows of the previous segment any more
#pragma unroll 4
    for (int n = threadIdx.x % kWarpgroupThreads; n < kWarpgroupRows * kPieces; n += kWarpgroupThreads) {
      const int row = n / kPieces, piece = n % kPieces;
      const QueryRow at = query_row(plan_, s.kv_head, first + row);
      const bool valid = first + row < end;
      const T* from = valid ? q + at.row * p_.q_strides.row + at.head * p_.q_strides.head + piece * 8 : q;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + QueryTile::offset(row, piece)), "l"(from),
                   "r"(valid ? 16 : 0)
                   : "memory");
    }
  }
  __device__ void finish_load_q() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if constexpr (kConvertsQ) {
      sync_warpgroup();
      scale_ = scale_to_half<D, QueryTile>(shared_.q[warpgroup_], 16 * warp_, p_.log2_scale);
    }
    fence_for_wgmma();
    sync_warpgroup();
  }

  // Return what rows lane / 4 and lane / 4 + 8 of the warp attend to in a tile.
  __device__ TileMask tile_mask_of(const Segment& s, int tile) const {
    TileMask visible;
    const int64_t first = int64_t{tile} * kTokens;
    if constexpr (kTracksAllVisible)
      visible.all = first + kTokens <= all_visible_end_ && first >= all_visible_begin_;
    else
      visible.all = first + kTokens <= s.request.prefix && first >= s.request.end - p_.window;
#pragma unroll
    for (int w = 0; w < kWords; ++w) visible.all &= ring_.present_tokens(cursor_.key().at, w) == ~uint64_t{0};
    if (visible.all) return visible;
    // Each lane computes the mask of 64 tokens for one of the warp's rows.
    const int lane = threadIdx.x % kWarp, last = s.request.valid_rows * plan_.gqa_group.divisor - 1;
    const int i = plan_.gqa_group.div(min(first_row(s) + warp_ * 16 + lane % 16, last)), my_word = lane / 16 % kWords;
    const uint64_t mine =
        visible_word(p_, s.request, i, first + 64 * my_word) & ring_.present_tokens(cursor_.key().at, my_word);
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int h = 0; h < 2; ++h) visible.bits[w][h] = __shfl_sync(kFullMask, mine, 16 * w + 8 * h + lane / 4);
    return visible;
  }

  // Issue scores = q k^T.
  __device__ void multiply_qk(Scores& scores) const {
    const WarpOperand q(wgmma_operand(shared_.q[warpgroup_], 0));
    const WarpOperand k(wgmma_operand(ring_.keys(cursor_.key().at), 0));
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      const int panel = d / 64, panel_offset = d % 64 * 2;
      QkMma::multiply(q.offset(panel * QueryTile::kPanel + panel_offset),
                      k.offset(panel * Ring::Stage::kPanel + panel_offset), d > 0, scores);
    }
    cute::warpgroup_commit_batch();
  }

  // Issue rows.out += weights v.
  __device__ void accumulate_pv(Cursor cursor, const Weights& weights, OnlineSoftmax<D>& rows) const {
    const WarpOperand v(wgmma_operand(ring_.values(cursor.value().at), Ring::Stage::kPanel));
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) PvMma::multiply(weights[n], v.offset(n * 16 * 128), true, rows.out);
    cute::warpgroup_commit_batch();
  }

  __device__ auto softmax(const TileMask& visible, Scores& scores, OnlineSoftmax<D>& rows) const {
    const Scale scale = rows.cap(p_, kConvertsQ ? scale_ : Scale{p_.log2_scale, p_.log2_scale}, scores);
    if (!visible.all)
#pragma unroll
      for (int w = 0; w < kWords; ++w) rows.mask(visible.bits[w], reinterpret_cast<float (&)[8][4]>(scores[8 * w]));
    return rows.softmax(scale, scores);
  }

  // Write rows straight from registers, 64 bytes of a row at a time. Four adjacent lanes hold eight columns of a row,
  // and exchange them so that each lane has a piece of 16 bytes.
  __device__ void write(const Segment& s, const OnlineSoftmax<D>& rows) const {
    const int lane = threadIdx.x % kWarp, end = s.request.valid_rows * plan_.gqa_group.divisor;
    const int first_of_block = s.first_row + row_tile_ * kRows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warpgroup_ * kWarpgroupRows + warp_ * 16 + lane / 4 + 8 * h;
      const bool valid = first_of_block + row < end;
      const float max = rows.max[h], sum = rows.sum[h];
      if (s.splits == 1) {
        const QueryRow at = query_row(plan_, s.kv_head, first_of_block + row);
        const float factor = sum == 0 ? 0 : p_.v_scale / sum;
        T* out = static_cast<T*>(p_.out) + s.request.out_start + at.row * p_.out_strides.row +
                 at.head * p_.out_strides.head + lane % 4 * 8;
#pragma unroll
        for (int d = 0; d < D / 8; d += 4) {
          uint32_t x[4];
#pragma unroll
          for (int k = 0; k < 4; ++k)
            x[k] = pack<T>(rows.out[d + k][2 * h] * factor, rows.out[d + k][2 * h + 1] * factor);
          swap_across(lane & 1, 1, x[0], x[1]);
          swap_across(lane & 1, 1, x[2], x[3]);
          swap_across(lane & 2, 2, x[0], x[2]);
          swap_across(lane & 2, 2, x[1], x[3]);
          if (valid) *reinterpret_cast<uint4*>(out + 8 * d) = make_uint4(x[0], x[1], x[2], x[3]);
        }
        if (valid && lane % 4 == 0) store_lse(p_, s.request, at, max, sum);
      } else {
        float* partial = partial_of(p_, plan_, s.partial, row_tile_, D);
        float* to = partial + row * D + lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll
        for (int d = 0; d < D / 8; d += 2) {
          float a[2] = {rows.out[d][2 * h], rows.out[d][2 * h + 1]};
          float b[2] = {rows.out[d + 1][2 * h], rows.out[d + 1][2 * h + 1]};
#pragma unroll
          for (int e = 0; e < 2; ++e) swap_across(lane & 1, 1, a[e], b[e]);
          if (valid) *reinterpret_cast<float4*>(to + 8 * d) = make_float4(a[0], a[1], b[0], b[1]);
        }
        if (valid && lane % 4 == 0) {
          partial[kRows * D + row] = max;
          partial[kRows * (D + 1) + row] = sum;
        }
      }
    }
  }

  // Swap `b` of the lower lane with `a` of the upper lane; the lanes differ by `step`.
  template <class X>
  __device__ static void swap_across(bool upper, int step, X& a, X& b) {
    const X other = __shfl_xor_sync(kFullMask, upper ? a : b, step);
    (upper ? a : b) = other;
  }

  Shared& shared_;
  Ring& ring_;
  const TreeAttentionParams& p_;
  const DevicePlan& plan_;
  const int row_tile_;
  const unsigned blocks_ = kMulticast ? Cluster::size() : 1;  // of the cluster
  // The shuffle shows the compiler that the value is warp-uniform, so that it computes operand addresses once per warp.
  const int warpgroup_ =
      kWarpgroups == 1 ? 0 : __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp % 4;
  Turn<Ring::kSegments> turn_;  // of the next segment
  Cursor cursor_;
  bool q_load_started_ = false;    // whether q of the next segment is already being loaded
  int64_t all_visible_begin_ = 0;  // KV visible to all of the warpgroup's rows, with kTracksAllVisible
  int all_visible_end_ = 0;
  Scale scale_;  // of scores, if rows of q were converted to Half
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocksPerSm)
    wgmma_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ DevicePlan plan,
                 const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) {
    shared.ring.init();
    if constexpr (Attention::kMulticast) Cluster::fence_barrier_init();
  }
  __syncthreads();
  if constexpr (Attention::kMulticast) Cluster::arrive_relaxed();
  const int worker = blockIdx.x / plan.row_tiles, row_tile = blockIdx.x % plan.row_tiles;
  const int warp = threadIdx.x / kWarp;
  if (warp < Attention::kConsumers) {
    if constexpr (Attention::kReallocatesRegisters) cutlass::arch::warpgroup_reg_alloc<Attention::kConsumerRegisters>();
    Attention(shared, p, plan, row_tile).consume();
  } else {
    if constexpr (Attention::kReallocatesRegisters)
      cutlass::arch::warpgroup_reg_dealloc<Attention::kProducerRegisters>();
    if constexpr (Attention::kFp8)
      if (warp >= Attention::kConsumers + Attention::kProducers) return shared.ring.dequantize_all();
    if constexpr (Attention::kMulticast) Cluster::wait();
    shared.ring.produce(p, plan, worker, &maps);
  }
#endif
}

template <class Attention>
void launch_wgmma(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  launch_persistent<Attention>(wgmma_kernel<Attention>, p, plan, stream, encode_tensor_maps(p));
}

// Instantiated by instantiations/, one file per head dimension, so that they compile in parallel.
template <int D>
void wgmma_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    // As many stages as fit: two blocks share an SM's 228 KB of shared memory, one block can have 227.
    constexpr int kTokens64 = tile_tokens_of(Kernel::kWgmma, D, 64, false);
    constexpr int kTokens128 = tile_tokens_of(Kernel::kWgmma, D, 128, false);
    constexpr int kStages128 = D == 64 ? 6 : D == 128 ? 3 : 2, kStages64 = D == 256 ? 3 : 6;
    if (plan.tile_rows == 128)
      return launch_wgmma<WgmmaAttention<T, T, D, 2, kTokens128, kStages128, 1>>(p, plan, stream);
    if constexpr (D < 256)
      if (plan.blocks_per_sm == 2) return launch_wgmma<WgmmaAttention<T, T, D, 1, kTokens64, 3, 2>>(p, plan, stream);
    launch_wgmma<WgmmaAttention<T, T, D, 1, kTokens64, kStages64, 1>>(p, plan, stream);
  });
}

// The same for FP8 pools, with as many FP8 stages as fit.
template <int D>
void dequant_smem_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    constexpr int kTokens64 = tile_tokens_of(Kernel::kDequantSmem, D, 64, true);
    constexpr int kTokens128 = tile_tokens_of(Kernel::kDequantSmem, D, 128, true);
    constexpr int kStages128 = D == 64 ? 8 : D == 128 ? 2 : 1;
    if (plan.tile_rows == 128)
      return launch_wgmma<WgmmaAttention<T, Float8, D, 2, kTokens128, kStages128, 1, 2, 2>>(p, plan, stream);
    if constexpr (D == 256)
      launch_wgmma<WgmmaAttention<T, Float8, D, 1, kTokens64, 2, 1, 2, 2>>(p, plan, stream);
    else
      launch_wgmma<WgmmaAttention<T, Float8, D, 1, kTokens64, 3, 2, 1, 2>>(p, plan, stream);
  });
}

}  // namespace specdec::attention
