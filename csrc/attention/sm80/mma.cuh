// tree_attention with mma.sync (compute capability 8.0 and later) for tiles of 16, 32 or 64 rows of a KV head, where
// the work is memory-bound: streaming the KV.
//
// A block has two producer warps and four consumer warps. Each consumer has 16 rows and a quarter, half or all of a
// tile's tokens, with a softmax of its own. So consumers meet only at the end of a segment, and K and V are read from
// shared memory no more often for fewer rows. Grid: row_tiles x workers persistent blocks, one or two per SM. Traffic:
// the KV of each request once per work item.
#pragma once

#include "attention/common/kv_ring.cuh"
#include "attention/common/launch.cuh"
#include "attention/common/merge.cuh"
#include "attention/common/mma_operands.cuh"

namespace specdec::attention {

// Four columns of a row's partial output, the row's maximum and its sum of weights.
struct RowQuad {
  float4 x;
  float row_max, row_sum;
};

// Reduce the partial results of a block's warps. kWarpsPerRows warps processed the same 16 rows over different tokens:
// warp w has rows 16 (w / kWarpsPerRows) to + 15. Needs an exclusive buffer of kWarps * 16 * D floats.
template <class Operands, int D, int kWarps, int kWarpsPerRows>
struct SegmentWriter {
  static constexpr int kRows = kWarps / kWarpsPerRows * 16, kThreads = kWarps * kWarp;
  float max[kWarps][16], sum[kWarps][16];

  __device__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

  // Store the warps' partial results in the buffer.
  __device__ __forceinline__ void store(OnlineSoftmax<D>& rows, float* buffer) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    rows.finish();
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[warp][lane / 4 + 8 * h] = rows.max[h];
        sum[warp][lane / 4 + 8 * h] = rows.sum[h];
      }
    }
    sync();  // the buffer is free: its stage has been consumed
#pragma unroll
    for (int n = 0; n < D / 16; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        Operands::visit_columns(rows.out, n, h, [&](int column, float2 x) {
          *reinterpret_cast<float2*>(address_of(buffer, warp, lane / 4 + 8 * h, column)) = x;
        });
    sync();
  }

  // Return four columns of a row, from `column` on, reduced over warps. Call after store().
  __device__ __forceinline__ RowQuad reduced_row(int row, int column, float* buffer) const {
    const int w = row / 16 * kWarpsPerRows;
    RowQuad all{.x = {}, .row_max = max[w][row % 16], .row_sum = 0};
#pragma unroll
    for (int k = 1; k < kWarpsPerRows; ++k) all.row_max = fmaxf(all.row_max, max[w + k][row % 16]);
#pragma unroll
    for (int k = 0; k < kWarpsPerRows; ++k) {
      const float weight = all.row_max == -INFINITY ? 0 : exp2_fast(max[w + k][row % 16] - all.row_max);
      const float4 y = *reinterpret_cast<const float4*>(address_of(buffer, w + k, row % 16, column));
      all.x.x += weight * y.x, all.x.y += weight * y.y, all.x.z += weight * y.z, all.x.w += weight * y.w;
      all.row_sum += weight * sum[w + k][row % 16];
    }
    return all;
  }

 private:
  // Swizzle rows by 32 bytes, so that 8 lanes that write one column of 8 rows hit 8 different banks.
  __device__ static float* address_of(float* buffer, int warp, int row, int column) {
    return buffer + (warp * 16 + row) * D + ((column / 8 ^ row) % 8 * 8) + column % 8 + column / 64 * 64;
  }
};

// T: type of query rows. Kv: type of the pools.
template <class T, class Kv, int D, int kRows, int kStages>
class MmaAttention {
 public:
  using Operands = MmaOperands<T, Kv, D>;
  static constexpr bool kFp8 = std::is_same_v<Kv, Float8>;
  static constexpr int kWarps = 4;                           // consumers
  static constexpr int kWarpsPerRows = kWarps * 16 / kRows;  // warps that share the same 16 rows
  static constexpr int kTokens = tile_tokens_of(Kernel::kMma, D, kRows, kFp8);
  static constexpr int kMyTokens = kTokens / kWarpsPerRows;  // tokens of a tile that one warp has
  // Tokens that a warp multiplies at a time.
  static constexpr int kStep = kMyTokens < Operands::kStep ? kMyTokens : Operands::kStep;
  using Ring = KvRing<kTokens, kFp8 ? D : 2 * D, kStages, kWarps, 2>;
  static constexpr int kThreads = (kWarps + Ring::kProducers) * kWarp;
  static constexpr int kBlocksPerSm = D == 256 ? 1 : 2;  // that fit on an SM
  static constexpr bool kMulticast = false;
  using Writer = SegmentWriter<Operands, D, kWarps, kWarpsPerRows>;

  struct Shared {
    Ring ring;
    Writer writer;
  };
  static_assert(kWarps * 16 * D * sizeof(float) <= sizeof(typename Ring::Stage));

  __device__ static void consume(Shared& shared, const TreeAttentionParams& p, const DevicePlan& plan, int row_tile) {
    Ring& ring = shared.ring;
    const int lane = threadIdx.x % kWarp;
    Turn<kStages> stage;
    Turn<Ring::kSegments> turn;
    wait_for_kernels_before();
    write_rows_without_kv<T, D, Writer::kThreads>(p, plan);
    while (true) {
      ring.segment_full[turn.at].wait(turn.parity);
      const Segment& s = ring.segments[turn.at];
      if (s.kv_head < 0) return;
      if (s.merge)
        merge_item<T, D, Writer::kThreads>(p, plan, s, row_tile, Writer::sync);
      else
        do_segment(shared, p, plan, row_tile, s, stage);
      __syncwarp();
      if (lane == 0) ring.segment_empty[turn.at].arrive();
      turn.advance();
    }
  }

 private:
  __device__ static void do_segment(Shared& shared, const TreeAttentionParams& p, const DevicePlan& plan, int row_tile,
                                    const Segment& s, Turn<kStages>& stage) {
    Ring& ring = shared.ring;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int first_row = s.first_row + row_tile * kRows + warp / kWarpsPerRows * 16;
    Operands operands;
    const Scale scale = load_q(p, plan, s, first_row, operands);
    OnlineSoftmax<D> rows;
    rows.clear();
    for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
      ring.full[stage.at].wait(stage.parity);
      add_tile(p, plan, s, first_row, operands, scale, ring, stage.at, int64_t{tile} * kTokens, rows);
      if (tile + 1 < s.end_tile) {
        if (lane == 0) ring.empty[stage.at].arrive();
        stage.advance();
      }
    }
    // The last tile's stage has been consumed and becomes the writer's buffer.
    const int first = s.first_row + row_tile * kRows;
    const int count = min(kRows, s.request.valid_rows * plan.gqa_group.divisor - first);
    auto* const buffer = reinterpret_cast<float*>(&ring.stages[stage.at]);
    shared.writer.store(rows, buffer);
    for (int n = threadIdx.x; n < count * (D / 4); n += Writer::kThreads) {
      const int row = n / (D / 4), column = n % (D / 4) * 4;
      store(p, plan, s, row_tile, row, column, shared.writer.reduced_row(row, column, buffer));
    }
    Writer::sync();
    if (s.splits > 1 && s.last) publish_partial<D>(p, plan, s, row_tile, Writer::sync);
    if (lane == 0) ring.empty[stage.at].arrive();
    stage.advance();
  }

  // Write four columns of a row: to out, or to the workspace if the item is split.
  __device__ __forceinline__ static void store(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                               int row_tile, int row, int column, const RowQuad& sums) {
    const auto& [x, row_max, row_sum] = sums;
    if (s.splits == 1) {
      const float factor = row_sum == 0 ? 0 : p.v_scale / row_sum;
      const QueryRow at = query_row(plan, s.kv_head, s.first_row + row_tile * kRows + row);
      store_out<T>(p, s.request, at, column, make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor));
      if (column == 0) store_lse(p, s.request, at, row_max, row_sum);
    } else {
      float* partial = partial_of(p, plan, s.partial, row_tile, D);
      *reinterpret_cast<float4*>(partial + row * D + column) = x;
      if (column == 0) {
        partial[kRows * D + row] = row_max;
        partial[kRows * D + kRows + row] = row_sum;
      }
    }
  }

 public:
  // Accumulate this warp's tokens of a tile, which starts at token `first`, into its rows, those from first_row on.
  template <class AnyRing>
  __device__ __forceinline__ static void add_tile(const TreeAttentionParams& p, const DevicePlan& plan,
                                                  const Segment& s, int first_row, const Operands& operands,
                                                  Scale scale, const AnyRing& ring, int stage, int64_t first,
                                                  OnlineSoftmax<D>& rows) {
#pragma unroll 1
    for (int step = 0; step < kMyTokens; step += kStep) {
      const int first_token = threadIdx.x / kWarp % kWarpsPerRows * kMyTokens + step;
      const uint64_t present = ring.present_tokens(stage, first_token / 64) >> first_token % 64;
      add_tokens(p, plan, s, first_row, operands, scale, ring.stages[stage], first, first_token, present, rows);
    }
  }

 private:
  // Accumulate kStep tokens of the tile that starts at token `first`. Bit j of `present`: token first_token + j is
  // present.
  __device__ __forceinline__ static void add_tokens(const TreeAttentionParams& p, const DevicePlan& plan,
                                                    const Segment& s, int first_row, const Operands& operands,
                                                    Scale scale, const typename Ring::Stage& kv, int64_t first,
                                                    int first_token, uint64_t present, OnlineSoftmax<D>& rows) {
    const int lane = threadIdx.x % kWarp;
    float scores[kStep / 8][4];
    operands.multiply_qk(kv, first_token, scores);
    FragmentPipeline<kStep / 16 * Operands::kFragments> values;
    if constexpr (kStep == 16)
      values.begin(Operands::read_v(kv, first_token));  // overlaps with the softmax, as registers suffice
    scale = rows.cap(p, scale, scores);
    first += first_token;
    // All rows attend to all of the tokens, unless some are in the tail, before some row's window, or not present.
    uint64_t any_visible = ~uint64_t{0};
    if (~present & low_bits(kStep) || first + kStep > s.request.prefix || p.window != INT64_MAX) {
      uint64_t visible[2] = {present, present};
      const int last = s.request.valid_rows * plan.gqa_group.divisor - 1;
      if (!all_visible(p, s.request, first, present & low_bits(kStep)))
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = plan.gqa_group.div(min(first_row + lane / 4 + 8 * h, last));
          visible[h] &= visible_word(p, s.request, i, first);
        }
      rows.mask(visible, scores);
      any_visible = visible[0] | visible[1];
      for (int step = 4; step < kWarp; step *= 2) any_visible |= __shfl_xor_sync(kFullMask, any_visible, step);
    }
    rows.rescale(rows.softmax(scale, scores));
    uint32_t weights[kStep / 16][4];
    pack_weights<typename Operands::MmaElement>(scores, weights);
    if constexpr (kStep > 16) values.begin(Operands::read_v(kv, first_token));
    operands.accumulate_pv(kv, first_token, weights, any_visible, values, rows.out);
  }

 public:
  // Load the rows from first_row on, with zeros past the request.
  __device__ static Scale load_q(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s, int first_row,
                                 Operands& operands) {
    const int row = first_row + threadIdx.x % kWarp / 4;
    const T* rows[2] = {q_row<T>(p, plan, s, row), q_row<T>(p, plan, s, row + 8)};
    return operands.load(p.log2_scale, rows);
  }
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocksPerSm)
    mma_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ DevicePlan plan) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // Hopper has kernels of its own
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) shared.ring.init();
  __syncthreads();
  const int worker = blockIdx.x / plan.row_tiles, row_tile = blockIdx.x % plan.row_tiles;
  const int warp = threadIdx.x / kWarp;
  if (warp < Attention::kWarps)
    Attention::consume(shared, p, plan, row_tile);
  else
    shared.ring.produce(p, plan, worker);
#endif
}

template <class T, class Kv, int D, int kRows>
void launch_mma(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  constexpr int kStages = D == 256 ? 2 : 384 / D;
  using Attention = MmaAttention<T, Kv, D, kRows, kStages>;
  launch_persistent<Attention>(mma_kernel<Attention>, p, plan, stream);
}

// Instantiated by instantiations/, one file per head dimension, so that they compile in parallel.
template <int D>
void mma_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  with_16_bit_types(p, [&]<class T, class Kv>() {
    if (plan.tile_rows == 16) return launch_mma<T, Kv, D, 16>(p, plan, stream);
    if (plan.tile_rows == 32) return launch_mma<T, Kv, D, 32>(p, plan, stream);
    if constexpr (D < 256) return launch_mma<T, Kv, D, 64>(p, plan, stream);
  });
}

}  // namespace specdec::attention
