// tree_attention with mma.sync (compute capability 8.0 and later): for 16, 32 or 64 rows of a KV head, where the job is
// to stream the KV. Two producer warps and four consumer warps a block; each consumer has 16 rows and a quarter, half
// or all of a tile's tokens, with a softmax of its own, so that consumers meet only at the end of a segment and fewer
// rows do not mean that K and V are read more often from shared memory. Grid: lanes x max_workers blocks, one or two
// per multiprocessor. Bytes: the KV of each request once per `lanes` row tiles.
#pragma once

#include "attention/kv_stream.cuh"
#include "attention/launch.h"
#include "attention/merge_parts.cuh"
#include "attention/mma_operands.cuh"

namespace specdec {

// Four sums of a row, its maximum, and the sum of its weights.
struct RowSums {
  float4 x;
  float top, total;
};

// Sums the rows that the warps of one block have summed. kShares warps met the same 16 rows, each its
// own tokens: warp w has rows 16 (w / kShares) to + 15. Through `buffer`, at least kWarps * 16 * D floats, which nobody
// else uses.
template <class Operands, int D, int kWarps, int kShares>
struct SegmentWriter {
  static constexpr int kRows = kWarps / kShares * 16, kThreads = kWarps * kWarp;
  float max[kWarps][16], sum[kWarps][16];

  __device__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

  // What the warps of this thread's block have of their rows goes to the buffer.
  __device__ __forceinline__ void leave(WarpRows<D>& rows, float* buffer) {
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
        Operands::spread(rows.out, n, h, [&](int column, float2 x) {
          *reinterpret_cast<float2*>(place(buffer, warp, lane / 4 + 8 * h, column)) = x;
        });
    sync();
  }

  // Then: four of a row's sums, from a column on.
  __device__ __forceinline__ RowSums sums_of(int row, int column, float* buffer) const {
    const int w = row / 16 * kShares;
    RowSums all{.x = {}, .top = max[w][row % 16], .total = 0};
#pragma unroll
    for (int k = 1; k < kShares; ++k) all.top = fmaxf(all.top, max[w + k][row % 16]);
#pragma unroll
    for (int k = 0; k < kShares; ++k) {
      const float weight = all.top == -INFINITY ? 0 : exp2_fast(max[w + k][row % 16] - all.top);
      const float4 y = *reinterpret_cast<const float4*>(place(buffer, w + k, row % 16, column));
      all.x.x += weight * y.x, all.x.y += weight * y.y, all.x.z += weight * y.z, all.x.w += weight * y.w;
      all.total += weight * sum[w + k][row % 16];
    }
    return all;
  }

 private:
  // Rows are swizzled by 32 bytes: 8 lanes that write one column of 8 rows meet 8 different banks.
  __device__ static float* place(float* buffer, int warp, int row, int column) {
    return buffer + (warp * 16 + row) * D + ((column / 8 ^ row) % 8 * 8) + column % 8 + column / 64 * 64;
  }
};

// Query rows of T, pools of Kv.
template <class T, class Kv, int D, int kRows, int kStages>
class MmaAttention {
 public:
  using Operands = MmaOperands<T, Kv, D>;
  static constexpr bool kFp8 = std::is_same_v<Kv, Float8>;
  static constexpr int kWarps = 4;                     // consumers
  static constexpr int kShares = kWarps * 16 / kRows;  // warps that share 16 rows
  static constexpr int kTokens = mma_tokens(kFp8);
  static constexpr int kMyTokens = kTokens / kShares;  // of those, a warp's
  // Of those, at a time.
  static constexpr int kStep = kMyTokens < Operands::kStep ? kMyTokens : Operands::kStep;
  using Stream = KvStream<kTokens, kFp8 ? D : 2 * D, kStages, kWarps, 2>;
  static constexpr int kThreads = (kWarps + Stream::kProducers) * kWarp;
  static constexpr int kBlocks = D == 256 ? 1 : 2;  // that a multiprocessor has room for
  static constexpr bool kPairs = false;
  using Writer = SegmentWriter<Operands, D, kWarps, kShares>;

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
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int first_row = s.first_row + lane_of_worker * kRows + warp / kShares * 16;
    Operands operands;
    const Scale scale = load_q(p, cut, s, first_row, operands);
    WarpRows<D> rows;
    rows.clear();
    for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
      stream.full[stage.at].wait(stage.parity);
      add_tile(p, cut, s, first_row, operands, scale, stream, stage.at, int64_t{tile} * kTokens, rows);
      if (tile + 1 < s.end_tile) {
        if (lane == 0) stream.empty[stage.at].arrive();
        stage.advance();
      }
    }
    // The last tile's stage has been consumed, so it is the writer's buffer.
    const int first = s.first_row + lane_of_worker * kRows;
    const int count = min(kRows, s.request.valid_rows * cut.group.divisor - first);
    auto* const buffer = reinterpret_cast<float*>(&stream.stages[stage.at]);
    shared.writer.leave(rows, buffer);
    for (int n = threadIdx.x; n < count * (D / 4); n += Writer::kThreads) {
      const int row = n / (D / 4), column = n % (D / 4) * 4;
      store(p, cut, s, lane_of_worker, row, column, shared.writer.sums_of(row, column, buffer));
    }
    Writer::sync();
    if (s.parts > 1 && s.last) leave_part<D>(p, cut, s, lane_of_worker, Writer::sync);
    if (lane == 0) stream.empty[stage.at].arrive();
    stage.advance();
  }

  // Four sums of a row: to out, or to the workspace where others have sums of it too.
  __device__ __forceinline__ static void store(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                               int lane_of_worker, int row, int column, const RowSums& sums) {
    const auto& [x, top, total] = sums;
    if (s.parts == 1) {
      const float factor = total == 0 ? 0 : p.v_scale / total;
      const QueryRow at = query_row(cut, s.head, s.first_row + lane_of_worker * kRows + row);
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

 public:
  // A warp's tokens of the tile in a stage, which starts at KV row `first`; its rows are those from first_row on.
  template <class AnyStream>
  __device__ __forceinline__ static void add_tile(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                                  int first_row, const Operands& operands, Scale scale,
                                                  const AnyStream& stream, int stage, int64_t first,
                                                  WarpRows<D>& rows) {
#pragma unroll 1
    for (int step = 0; step < kMyTokens; step += kStep) {
      const int first_token = threadIdx.x / kWarp % kShares * kMyTokens + step;
      const uint64_t there = stream.rows_there(stage, first_token / 64) >> first_token % 64;
      add_tokens(p, cut, s, first_row, operands, scale, stream.stages[stage], first, first_token, there, rows);
    }
  }

 private:
  // kStep tokens of the tile that starts at KV row `first`; bit j of `there`: token first_token + j is there.
  __device__ __forceinline__ static void add_tokens(const TreeAttentionParams& p, const Cut& cut, const Segment& s,
                                                    int first_row, const Operands& operands, Scale scale,
                                                    const typename Stream::Stage& kv, int64_t first, int first_token,
                                                    uint64_t there, WarpRows<D>& rows) {
    const int lane = threadIdx.x % kWarp;
    float scores[kStep / 8][4];
    operands.multiply_k(kv, first_token, scores);
    Pipeline<kStep / 16 * Operands::kBlocks> values;
    if constexpr (kStep == 16) values.begin(Operands::read_v(kv, first_token));  // registers are there: while they come
    scale = rows.cap(p, scale, scores);
    first += first_token;
    // All rows see all of the tokens, unless some are of the tail, before some row's window, or not there.
    uint64_t met = ~uint64_t{0};
    if (~there & low_bits(kStep) || first + kStep > s.request.prefix || p.window != INT64_MAX) {
      uint64_t seen[2] = {there, there};
      const int last = s.request.valid_rows * cut.group.divisor - 1;
      if (!all_see(p, s.request, first, there & low_bits(kStep)))
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = cut.group.div(min(first_row + lane / 4 + 8 * h, last));
          seen[h] &= visible_word(p, s.request, i, first);
        }
      rows.hide(seen, scores);
      met = seen[0] | seen[1];
      for (int step = 4; step < kWarp; step *= 2) met |= __shfl_xor_sync(kFullMask, met, step);
    }
    rows.follow(rows.weigh(scale, scores));
    uint32_t weights[kStep / 16][4];
    pack_weights<typename Operands::Factor>(scores, weights);
    if constexpr (kStep > 16) values.begin(Operands::read_v(kv, first_token));
    operands.add_v(kv, first_token, weights, met, values, rows.out);
  }

 public:
  // Rows from first_row on; zeros for those behind the request.
  __device__ static Scale load_q(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int first_row,
                                 Operands& operands) {
    const int row = first_row + threadIdx.x % kWarp / 4;
    const T* rows[2] = {q_row<T>(p, cut, s, row), q_row<T>(p, cut, s, row + 8)};
    return operands.load(p.log2_scale, rows);
  }
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocks)
    mma_attention_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // where wgmma takes all of this, it need not be compiled
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

template <class T, class Kv, int D, int kRows>
void start_mma_attention(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  constexpr int kStages = D == 256 ? 2 : 384 / D;
  using Attention = MmaAttention<T, Kv, D, kRows, kStages>;
  start_on_tensor_cores<Attention>(mma_attention_kernel<Attention>, p, cut, stream);
}

// Of one head dimension; defined in a file of its own for each, so that they compile side by side.
template <int D>
void mma_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  with_16_bit_types(p, [&]<class T, class Kv>() {
    if (cut.rows == 16) return start_mma_attention<T, Kv, D, 16>(p, cut, stream);
    if (cut.rows == 32) return start_mma_attention<T, Kv, D, 32>(p, cut, stream);
    if constexpr (D < 256) return start_mma_attention<T, Kv, D, 64>(p, cut, stream);
  });
}

}  // namespace specdec
