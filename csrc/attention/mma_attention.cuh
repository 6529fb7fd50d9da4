// tree_attention with mma.sync (compute capability 8.0 and later): for 16, 32 or 64 rows of a KV head, where the job is
// to stream the KV. Two producer warps and four consumer warps a block; each consumer has 16 rows and 16, 32 or 64 of a
// tile's 64 tokens, with a softmax of its own, so that consumers meet only at the end of a segment and fewer rows do
// not mean that K and V are read more often from shared memory. Grid: lanes x max_workers blocks, two per
// multiprocessor. Bytes: the KV of each request once per `lanes` row tiles.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "attention/kv_stream.cuh"
#include "attention/launch.h"
#include "attention/merge_parts.cuh"

namespace specdec {

template <class T>
struct Mma;
template <>
struct Mma<BFloat16> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};
template <>
struct Mma<Half> : cute::SM80_16x8x16_F32F16F16F32_TN {};

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma<T>::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]);
}

// Writes the rows of a segment that the warps of one block have summed. kShares warps met the same 16 rows, each its
// own tokens: warp w has rows 16 (w / kShares) to + 15. Through `buffer`, at least kWarps * 16 * D floats, which nobody
// else uses.
template <class T, int D, int kWarps, int kShares>
struct SegmentWriter {
  static constexpr int kRows = kWarps / kShares * 16, kThreads = kWarps * kWarp;
  float max[kWarps][16], sum[kWarps][16];

  __device__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

  __device__ void write(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int lane_of_worker,
                        WarpRows<D>& rows, float* buffer) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    rows.finish();
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[warp][lane / 4 + 8 * h] = rows.max[h];
        sum[warp][lane / 4 + 8 * h] = rows.sum[h];
      }
    }
    const int first = s.first_row + lane_of_worker * kRows;
    const int count = min(kRows, s.request.valid_rows * cut.group.divisor - first);
    sync();  // the buffer is free: its stage has been consumed
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* x = rows.out[n] + 2 * h;
        *reinterpret_cast<float2*>(place(buffer, warp, lane / 4 + 8 * h, 8 * n + lane % 4 * 2)) =
            make_float2(x[0], x[1]);
      }
    sync();
    for (int n = threadIdx.x; n < count * (D / 4); n += kThreads) {
      const int row = n / (D / 4), column = n % (D / 4) * 4, w = row / 16 * kShares;
      float top = max[w][row % 16], total = 0;
#pragma unroll
      for (int k = 1; k < kShares; ++k) top = fmaxf(top, max[w + k][row % 16]);
      float4 x{};
#pragma unroll
      for (int k = 0; k < kShares; ++k) {
        const float weight = top == -INFINITY ? 0 : exp2_fast(max[w + k][row % 16] - top);
        const float4 y = *reinterpret_cast<const float4*>(place(buffer, w + k, row % 16, column));
        x.x += weight * y.x, x.y += weight * y.y, x.z += weight * y.z, x.w += weight * y.w;
        total += weight * sum[w + k][row % 16];
      }
      if (s.parts == 1) {
        const float factor = total == 0 ? 0 : p.v_scale / total;
        const QueryRow at = query_row(cut, s.head, first + row);
        store_out<T>(p, s.request, at, column, make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor));
        if (column == 0) store_lse(p, s.request, at, top, total);
      } else {
        float* part = part_of(p, cut, s.part, lane_of_worker, D);
        *reinterpret_cast<float4*>(part + row * D + column) = x;
        if (column == 0) {
          part[kRows * D + row] = top;
          part[kRows * D + kRows + row] = total;
        }
      }
    }
  }

 private:
  // Rows are swizzled by 32 bytes: 8 lanes that write one column of 8 rows meet 8 different banks.
  __device__ static float* place(float* buffer, int warp, int row, int column) {
    return buffer + (warp * 16 + row) * D + ((column / 8 ^ row) % 8 * 8) + column % 8 + column / 64 * 64;
  }
};

template <class T, int D, int kRows, int kStages>
class MmaAttention {
 public:
  static constexpr int kWarps = 4;                     // consumers
  static constexpr int kShares = kWarps * 16 / kRows;  // warps that share 16 rows
  static constexpr int kTokens = 64;
  static constexpr int kMyTokens = kTokens / kShares;  // of those, a warp's
  using Stream = KvStream<kTokens, 2 * D, kStages, kWarps, 2>;
  static constexpr int kThreads = (kWarps + Stream::kProducers) * kWarp;
  using Writer = SegmentWriter<T, D, kWarps, kShares>;

  struct Shared {
    Stream stream;
    Writer writer;
  };
  static_assert(kWarps * 16 * D * sizeof(float) <= sizeof(typename Stream::Stage));

  __device__ static void consume(Shared& shared, const TreeAttentionParams& p, const Cut& cut, int lane_of_worker) {
    Stream& stream = shared.stream;
    const int lane = threadIdx.x % kWarp;
    Turn<kStages> stage;
    Turn<Stream::kSegments> turn;
    wait_for_kernels_before();
    write_unseen_rows<T, D, Writer::kThreads>(p, cut);
    while (true) {
      stream.announced[turn.at].wait(turn.parity);
      const Segment& s = stream.segments[turn.at];
      if (s.head < 0) return;
      if (s.merge)
        merge_group<T, D, Writer::kThreads>(p, cut, s, lane_of_worker, Writer::sync);
      else
        do_segment(shared, p, cut, lane_of_worker, s, stage);
      __syncwarp();
      if (lane == 0) stream.read[turn.at].arrive();
      turn.advance();
    }
  }

 private:
  __device__ static void do_segment(Shared& shared, const TreeAttentionParams& p, const Cut& cut, int lane_of_worker,
                                    const Segment& s, Turn<kStages>& stage) {
    Stream& stream = shared.stream;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, first_token = warp % kShares * kMyTokens;
    const int first_row = s.first_row + lane_of_worker * kRows + warp / kShares * 16;
    uint32_t q[D / 16][4];
    load_q(p, cut, s, first_row, q);
    WarpRows<D> rows;
    rows.clear();
    for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
      stream.full[stage.at].wait(stage.parity);
      const typename Stream::Stage& kv = stream.stages[stage.at];
      float scores[kMyTokens / 8][4];
      multiply_k(kv, first_token, q, scores);
      const float scale = rows.cap(p, scores);
      const uint64_t there = stream.rows_there(stage.at, 0);
      const int64_t first = int64_t{tile} * kTokens;
      // All rows see all of the tile, unless it is of the tail, before some row's window, or not all there.
      uint64_t met = ~uint64_t{0};
      if (there != ~uint64_t{0} || first + kTokens > s.request.prefix || p.window != INT64_MAX) {
        uint64_t seen[2];
        const int last = s.request.valid_rows * cut.group.divisor - 1;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = cut.group.div(min(first_row + lane / 4 + 8 * h, last));
          seen[h] = (visible_word(p, s.request, i, first) & there) >> first_token;
        }
        rows.hide(seen, scores);
        met = seen[0] | seen[1];
        for (int step = 4; step < kWarp; step *= 2) met |= __shfl_xor_sync(kFullMask, met, step);
      }
      rows.follow(rows.weigh(scale, scores));
      add_v(kv, first_token, scores, met, rows);
      if (tile + 1 < s.end_tile) {
        if (lane == 0) stream.empty[stage.at].arrive();
        stage.advance();
      }
    }
    // The last tile's stage has been consumed, so it is the writer's buffer.
    shared.writer.write(p, cut, s, lane_of_worker, rows, reinterpret_cast<float*>(&stream.stages[stage.at]));
    Writer::sync();
    if (s.parts > 1 && s.last) leave_part<D>(p, cut, s, lane_of_worker, Writer::sync);
    if (lane == 0) stream.empty[stage.at].arrive();
    stage.advance();
  }

  // Rows from first_row on as A fragments; zeros for those behind the request.
  __device__ static void load_q(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int first_row,
                                uint32_t (&q)[D / 16][4]) {
    const int lane = threadIdx.x % kWarp, end = s.request.valid_rows * cut.group.divisor;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = first_row + lane / 4 + 8 * h;
      const QueryRow at = query_row(cut, s.head, n);
      const T* row =
          static_cast<const T*>(p.q) + s.request.q_start + at.row * p.q_strides.row + at.head * p.q_strides.head;
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          q[k][2 * c + h] = n < end ? *reinterpret_cast<const uint32_t*>(row + 16 * k + 8 * c + lane % 4 * 2) : 0;
    }
  }

  // Calls use(i, b) for fragments 0 to kCount - 1 in order, each read by read(i, b) four fragments ahead of its use:
  // the way from shared memory is longer than what the tensor cores do with one.
  template <int kCount, class Read, class Use>
  __device__ __forceinline__ static void pipeline(Read&& read, Use&& use) {
    constexpr int kAhead = 4;
    uint32_t b[kAhead][4];
#pragma unroll
    for (int i = 0; i < kAhead && i < kCount; ++i) read(i, b[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      use(i, b[i % kAhead]);
      if (i + kAhead < kCount) read(i + kAhead, b[i % kAhead]);
    }
  }

  // scores = q k^T for kMyTokens tokens from first_token on.
  __device__ __forceinline__ static void multiply_k(const typename Stream::Stage& kv, int first_token,
                                                    const uint32_t (&q)[D / 16][4], float (&scores)[kMyTokens / 8][4]) {
    constexpr int kBlocks = kMyTokens / 16;
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (auto& s : scores) s[0] = s[1] = s[2] = s[3] = 0;
    pipeline<D / 16 * kBlocks>(
        [&](int i, uint32_t (&b)[4]) {
          // 16 tokens by 16 dimensions: lanes 0-7 and 16-23 name rows 0-7 and 8-15 of the lower 8, the others of the
          // upper.
          const int row = first_token + 16 * (i % kBlocks) + lane % 8 + lane / 16 * 8;
          cute::SM75_U32x4_LDSM_N::copy(
              *reinterpret_cast<const cute::uint128_t*>(kv.k + kv.offset(row, 2 * (i / kBlocks) + lane / 8 % 2)), b[0],
              b[1], b[2], b[3]);
        },
        [&](int i, const uint32_t (&b)[4]) {
          mma<T>(scores[2 * (i % kBlocks)], q[i / kBlocks], b[0], b[1]);
          mma<T>(scores[2 * (i % kBlocks) + 1], q[i / kBlocks], b[2], b[3]);
        });
  }

  // rows.out += weights v. Tokens that are not in `met` have weight 0 in all rows, and their values may be NaN.
  __device__ __forceinline__ static void add_v(const typename Stream::Stage& kv, int first_token,
                                               const float (&weights)[kMyTokens / 8][4], uint64_t met,
                                               WarpRows<D>& rows) {
    constexpr int kBlocks = D / 16;
    const int lane = threadIdx.x % kWarp;
    uint32_t a[kMyTokens / 16][4];
#pragma unroll
    for (int n = 0; n < kMyTokens / 16; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        a[n][e] = pack<T>(weights[2 * n + e / 2][e % 2 * 2], weights[2 * n + e / 2][e % 2 * 2 + 1]);
    uint32_t keep[kMyTokens / 16][2];  // of the two values in a register of tokens 0-7, of 8-15
#pragma unroll
    for (int n = 0; n < kMyTokens / 8; ++n) {
      const uint32_t tokens = static_cast<uint32_t>(met >> (8 * n + lane % 4 * 2));
      keep[n / 2][n % 2] = (tokens & 1 ? 0xffffu : 0) | (tokens & 2 ? 0xffff0000u : 0);
    }
    pipeline<kMyTokens / 16 * kBlocks>(
        [&](int i, uint32_t (&b)[4]) {
          const int row = first_token + 16 * (i / kBlocks) + lane % 16;
          cute::SM75_U16x8_LDSM_T::copy(
              *reinterpret_cast<const cute::uint128_t*>(kv.v + kv.offset(row, 2 * (i % kBlocks) + lane / 16)), b[0],
              b[1], b[2], b[3]);
        },
        [&](int i, uint32_t (&b)[4]) {
#pragma unroll
          for (int e = 0; e < 4; ++e) b[e] &= keep[i / kBlocks][e % 2];
          mma<T>(rows.out[2 * (i % kBlocks)], a[i / kBlocks], b[0], b[1]);
          mma<T>(rows.out[2 * (i % kBlocks) + 1], a[i / kBlocks], b[2], b[3]);
        });
  }
};

template <class T, int D, int kRows, int kStages>
__global__ void __launch_bounds__(MmaAttention<T, D, kRows, kStages>::kThreads, D == 256 ? 1 : 2)
    mma_attention_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // where wgmma takes all of this, it need not be compiled
  using Attention = MmaAttention<T, D, kRows, kStages>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) shared.stream.init();
  __syncthreads();
  const int worker = blockIdx.x / cut.lanes, lane_of_worker = blockIdx.x % cut.lanes;
  const int warp = threadIdx.x / kWarp;
  if (warp < Attention::kWarps)
    Attention::consume(shared, p, cut, lane_of_worker);
  else
    shared.stream.produce(p, cut, worker);
#endif
}

template <class T, int D, int kRows>
void start_mma_attention(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  constexpr int kStages = D == 256 ? 2 : 384 / D;
  using Attention = MmaAttention<T, D, kRows, kStages>;
  const auto kernel = mma_attention_kernel<T, D, kRows, kStages>;
  start_on_tensor_cores<Attention>(kernel, p, cut, stream);
}

// Of one head dimension; defined in a file of its own for each, so that they compile side by side.
template <int D>
void mma_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    if (cut.rows == 16) return start_mma_attention<T, D, 16>(p, cut, stream);
    if (cut.rows == 32) return start_mma_attention<T, D, 32>(p, cut, stream);
    if constexpr (D < 256) return start_mma_attention<T, D, 64>(p, cut, stream);
  });
}

}  // namespace specdec
