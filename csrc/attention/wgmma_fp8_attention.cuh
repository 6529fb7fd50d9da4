// tree_attention of 8-bit pools with wgmma (compute capability 9.0): 16 or 32 rows of a KV head. wgmma takes one
// factor from registers, and that is where 8-bit floats become Half: so it is the keys and values that are the rows of
// a product, scores = k q^T and out = v^T weights, and each is converted once for all query rows. A consumer warpgroup,
// of which each warp has a quarter of a tile's tokens and then of the dimensions, and two producer warps a block. Grid:
// lanes x max_workers blocks, one or two per multiprocessor. Bytes: the KV of each request once per `lanes` row tiles.
#pragma once

#include <cfloat>
#include <cute/arch/copy_sm90.hpp>

#include "attention/kv_stream.cuh"
#include "attention/launch.h"
#include "attention/merge_parts.cuh"
#include "attention/mma_operands.cuh"
#include "core/wgmma.cuh"

namespace specdec {

template <class T, int D, int kRows>
class WgmmaFp8Attention {
 public:
  static constexpr int kTokens = kWgmmaFp8Tokens, kConsumers = 4, kStages = D == 256 ? 5 : 640 / D;
  static constexpr int kBlocks = D == 256 ? 1 : 2;  // that a multiprocessor has room for
  using Stream = KvStream<kTokens, D, kStages, kConsumers, 2>;
  static constexpr int kThreads = (kConsumers + Stream::kProducers) * kWarp;
  using QueryTile = Stage<kRows, 2 * D>;  // of which k is used
  using WeightTile = Stage<kTokens, 2 * kRows>;

  // What is known of a row besides its sums.
  struct RowState {
    float max, scale;  // of the scores so far in powers of two, and what brings scores to those
  };
  struct Shared {
    Stream stream;
    alignas(1024) unsigned char q[kRows * 2 * D];
    alignas(1024) unsigned char weights[kTokens * 2 * kRows];
    alignas(16) RowState state[kRows];
    alignas(16) uint64_t seen[kRows];  // bit j: the row sees token j of the tile
    alignas(16) float factor[kRows];
    float of_warps[kConsumers][kRows];
  };

  __device__ WgmmaFp8Attention(Shared& shared, const TreeAttentionParams& p, const Cut& cut, int lane_of_worker)
      : shared_(shared), stream_(shared.stream), p_(p), cut_(cut), lane_of_worker_(lane_of_worker) {}

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
  using Operands = MmaOperands<T, Float8, D>;
  using MultiplyK = Wgmma<Half, kRows, cute::SM90::GMMA::Major::K>;
  using MultiplyV = Wgmma<Half, kRows, cute::SM90::GMMA::Major::MN>;
  static constexpr int kHalves = D / 64;       // products of 64 dimensions
  static constexpr float kSlack = 8;           // as WarpRows has it
  static constexpr float kNothing = -FLT_MAX;  // the maximum of no scores; differences to it are numbers

  // A lane has tokens lane / 4 and + 8 of its warp's 16, and of every 8 rows lane % 4 * 2 and the next one.
  using Scores = float[kRows / 8][4];
  using Sums = float[kRows / 8][2];
  using Out = float[kHalves][kRows / 8][4];  // dimensions instead of tokens, see write()
  using Fragments = uint32_t[D / 16][4];     // of 64 tokens' K or V, as rows of a product

  __device__ void do_segment(const Segment& s) {
    const int first_row = s.first_row + lane_of_worker_ * kRows;
    load_q(s, first_row);
    Out out;
    Sums sums;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      sums[n][0] = sums[n][1] = 0;
#pragma unroll
      for (int m = 0; m < kHalves; ++m) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0;
    }
    Fragments fragments{};
    for (int tile = s.first_tile; tile < s.end_tile; ++tile) add_tile(s, first_row, tile, fragments, sums, out);
    cute::warpgroup_wait<0>();
    pin_out(out);
    write(s, first_row, sums, out);
    if (s.parts > 1 && s.last) leave_part<D>(p_, cut_, s, lane_of_worker_, sync_consumers);
  }

  __device__ static void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * kWarp) : "memory"); }
  __device__ static bool sync_consumers_or(bool any) {
    uint32_t result;
    asm volatile(
        "{\n.reg .pred mine, all;\nsetp.ne.u32 mine, %1, 0;\nbarrier.cta.red.or.pred all, 1, %2, mine;\n"
        "selp.u32 %0, 1, 0, all;\n}"
        : "=r"(result)
        : "r"(static_cast<uint32_t>(any)), "n"(kConsumers * kWarp)
        : "memory");
    return result;
  }
  // What was written to shared memory by plain stores is there for wgmma too.
  __device__ static void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
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

  // Rows from first_row on, 16 a warp, as Operands has them; zeros for those behind the request.
  __device__ void load_q(const Segment& s, int first_row) {
    sync_consumers();  // nobody is at the segment before any more
    if (16 * warp_ < kRows) load_q_of_warp(s, first_row);
    sync_consumers();
  }
  __device__ void load_q_of_warp(const Segment& s, int first_row) {
    const int my_row = first_row + 16 * warp_ + lane_ / 4;
    const T* rows[2] = {q_row<T>(p_, cut_, s, my_row), q_row<T>(p_, cut_, s, my_row + 8)};
    Operands operands;
    const Scale scale = operands.load(p_.log2_scale, rows);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * warp_ + lane_ / 4 + 8 * h;
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          *reinterpret_cast<uint32_t*>(shared_.q + QueryTile::offset(row, 2 * k + c) + lane_ % 4 * 4) =
              operands.q[k][2 * c + h];
      if (lane_ % 4 == 0) shared_.state[row] = {kNothing, scale.of[h]};
    }
    show_to_wgmma();
  }

  // Scores, weights, and what the values add, which is multiplied while the next tile's keys come.
  __device__ void add_tile(const Segment& s, int first_row, int tile, Fragments& fragments, Sums& sums, Out& out) {
    stream_.full[stage_.at].wait(stage_.parity);
    const typename Stream::Stage& kv = stream_.stages[stage_.at];
    const uint64_t there = stream_.rows_there(stage_.at, 0);
    Scores scores;
    multiply_k(kv, fragments, out, scores);
    uint32_t values[8 * kHalves];
    load_v(kv, values);
    __syncwarp();
    if (lane_ == 0) stream_.empty[stage_.at].arrive();
    stage_.advance();

    cap(scores);
    // All rows see all of the tile, unless it is of the tail, before some row's window, or not all there.
    const int64_t first = int64_t{tile} * kTokens;
    if (~there || first + kTokens > s.request.prefix || first < s.request.end - p_.window)
      hide(s, first_row, first, there, scores);

    if (sync_consumers_or(rises(scores))) raise(scores, sums, out);  // behind it nobody reads the weights before
    weigh(scores, sums);
    pin(values);  // their registers come before the fragments'
    widen_v(values, fragments);
    show_to_wgmma();
    sync_consumers();
    add_v(fragments, out);
  }

  // scores = k q^T. Waits for the products before.
  __device__ __forceinline__ void multiply_k(const typename Stream::Stage& kv, Fragments& fragments, Out& out,
                                             Scores& scores) const {
    uint4 x[2][Operands::kPieces];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < Operands::kPieces; ++i)
        x[h][i] = *reinterpret_cast<const uint4*>(
            kv.k + kv.offset(16 * warp_ + lane_ / 4 + 8 * h, Operands::piece_of_lane(i)));
    cute::warpgroup_wait<0>();
    pin_out(out);
    pin_fragments(fragments);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < Operands::kPieces; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) widen((&x[h][i].x)[j], fragments[4 * i + j][h], fragments[4 * i + j][2 + h]);
    const uint64_t q = wgmma_operand(shared_.q, 0);
    pin_fragments(fragments);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      MultiplyK::multiply(fragments[k], q + ((k / 4 * QueryTile::kPanel + k % 4 * 32) >> 4), k > 0, scores);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    specdec::pin(scores);
    pin_fragments(fragments);
  }

  // 64 tokens of this warp's 16 kHalves dimensions, as MmaOperands has them.
  __device__ __forceinline__ void load_v(const typename Stream::Stage& kv, uint32_t (&x)[8 * kHalves]) const {
    // 32 tokens by 16 dimensions at once, or 16 by 32.
    constexpr int kAtOnce = kHalves == 1 ? 32 : 16, kBeside = kHalves == 1 ? 1 : kHalves / 2;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int row = i / kBeside * kAtOnce + lane_ % kAtOnce;
      const int piece = kHalves * warp_ + i % kBeside * 2 + lane_ / kAtOnce;
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(kv.v + kv.offset(row, piece)), x[4 * i],
                                    x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }
  // Rows of the product are the even dimensions of 16, then the odd ones.
  __device__ __forceinline__ static void widen_v(const uint32_t (&x)[8 * kHalves], Fragments& fragments) {
#pragma unroll
    for (int i = 0; i < 8 * kHalves; ++i)
      widen(__byte_perm(x[i], 0, 0x3120), fragments[i / 2][i % 2 * 2], fragments[i / 2][i % 2 * 2 + 1]);
  }

  // out += v^T weights; not waited for.
  __device__ __forceinline__ void add_v(Fragments& fragments, Out& out) const {
    const uint64_t b = wgmma_operand<WeightTile::kLine>(shared_.weights, 0);
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
    float4 s = *reinterpret_cast<const float4*>(&shared_.state[8 * n + lane_ % 4 * 2]);
    if (p_.soft_cap != 0) s.y = s.w = 1;
    return s;
  }

  __device__ __forceinline__ void cap(Scores& scores) const {
    if (p_.soft_cap == 0) return;
    const float inverse = 1 / p_.soft_cap;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scale = shared_.state[8 * n + lane_ % 4 * 2 + e % 2].scale;
        scores[n][e] = p_.soft_cap * tanh_fast(scores[n][e] * (scale * inverse));
      }
  }

  __device__ void hide(const Segment& s, int first_row, int64_t first, uint64_t there, Scores& scores) {
    if (threadIdx.x < kRows) {
      const int last = s.request.valid_rows * cut_.group.divisor - 1;
      const int i = cut_.group.div(min(first_row + static_cast<int>(threadIdx.x), last));
      shared_.seen[threadIdx.x] = visible_word(p_, s.request, i, first) & there;
    }
    sync_consumers();
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint64_t mine = shared_.seen[8 * n + lane_ % 4 * 2 + c] >> (16 * warp_ + lane_ / 4);
        if (!(mine & 1)) scores[n][c] = -INFINITY;
        if (!(mine & 1 << 8)) scores[n][2 + c] = -INFINITY;
      }
  }

  // Whether some score is far above its row's maximum.
  __device__ __forceinline__ bool rises(const Scores& scores) const {
    float top = -INFINITY;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float4 s = state_of(n);
      top = fmaxf(top, fmaf(fmaxf(scores[n][0], scores[n][2]), s.y, -s.x));
      top = fmaxf(top, fmaf(fmaxf(scores[n][1], scores[n][3]), s.w, -s.z));
    }
    return top > kSlack;
  }

  // Writes the weights and adds them to `sums`.
  __device__ __forceinline__ void weigh(const Scores& scores, Sums& sums) {
    const int token = 16 * warp_ + lane_ % 16;
#pragma unroll
    for (int n = 0; n < kRows / 8; n += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float4 s = state_of(n + k);
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = exp2_fast(fmaf(scores[n + k][e], e % 2 ? s.w : s.y, e % 2 ? -s.z : -s.x));
        sums[n + k][0] += x[0] + x[2];
        sums[n + k][1] += x[1] + x[3];
        packed[2 * k] = pack<Half>(x[0], x[1]);
        packed[2 * k + 1] = pack<Half>(x[2], x[3]);
      }
      cute::SM90_U32x4_STSM_N::copy(
          packed[0], packed[1], packed[2], packed[3],
          *reinterpret_cast<cute::uint128_t*>(shared_.weights + WeightTile::offset(token, n + lane_ / 16)));
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
    sync_consumers();
    if (threadIdx.x < kRows) {
      RowState& state = shared_.state[threadIdx.x];
      const float scale = p_.soft_cap != 0 ? 1 : state.scale;
      float top = -INFINITY;
      for (const auto& w : shared_.of_warps) top = fmaxf(top, w[threadIdx.x]);
      const bool rises = fmaf(top, scale, -state.max) > kSlack;
      shared_.factor[threadIdx.x] = rises ? exp2_fast(state.max - top * scale) : 1;
      if (rises) state.max = top * scale;
    }
    sync_consumers();
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float factor = shared_.factor[8 * n + lane_ % 4 * 2 + c];
        sums[n][c] *= factor;
#pragma unroll
        for (int m = 0; m < kHalves; ++m) out[m][n][c] *= factor, out[m][n][2 + c] *= factor;
      }
  }

  __device__ void write(const Segment& s, int first_row, const Sums& sums, const Out& out) {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = sums[n][c];
        for (int step = 4; step < kWarp; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
        if (lane_ < 4) shared_.of_warps[warp_][8 * n + lane_ % 4 * 2 + c] = sum;
      }
    sync_consumers();
    const int end = s.request.valid_rows * cut_.group.divisor;
    float* part = s.parts > 1 ? part_of(p_, cut_, s.part, lane_of_worker_, D) : nullptr;
    if (threadIdx.x < kRows) {
      const int row = threadIdx.x;
      float sum = 0;
      for (const auto& w : shared_.of_warps) sum += w[row];
      const float max = sum == 0 ? -INFINITY : shared_.state[row].max;
      shared_.factor[row] = part != nullptr ? 1 : sum == 0 ? 0 : p_.v_scale / sum;
      if (part != nullptr) {
        part[kRows * D + row] = max;
        part[kRows * (D + 1) + row] = sum;
      } else if (first_row + row < end) {
        store_lse(p_, s.request, query_row(cut_, s.head, first_row + row), max, sum);
      }
    }
    sync_consumers();
    // A lane has pairs of neighbouring dimensions, eight lanes those of 16.
    const int first_column = 16 * kHalves * warp_ + lane_ / 4 * 2;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * n + lane_ % 4 * 2 + c;
        if (first_row + row >= end) continue;
        const float factor = shared_.factor[row];
        const QueryRow at = query_row(cut_, s.head, first_row + row);
        T* to =
            static_cast<T*>(p_.out) + s.request.out_start + at.row * p_.out_strides.row + at.head * p_.out_strides.head;
#pragma unroll
        for (int m = 0; m < kHalves; ++m) {
          const float2 x = make_float2(out[m][n][c] * factor, out[m][n][2 + c] * factor);
          const int column = first_column + 16 * m;
          if (part != nullptr)
            *reinterpret_cast<float2*>(part + row * D + column) = x;
          else
            *reinterpret_cast<uint32_t*>(to + column) = pack<T>(x.x, x.y);
        }
      }
  }

  Shared& shared_;
  Stream& stream_;
  const TreeAttentionParams& p_;
  const Cut& cut_;
  const int lane_of_worker_;
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp, lane_ = static_cast<int>(threadIdx.x) % kWarp;
  Turn<kStages> stage_;
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocks)
    wgmma_fp8_attention_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) shared.stream.init();
  __syncthreads();
  const int worker = blockIdx.x / cut.lanes, lane_of_worker = blockIdx.x % cut.lanes;
  if (threadIdx.x / kWarp < Attention::kConsumers)
    Attention(shared, p, cut, lane_of_worker).consume();
  else
    shared.stream.produce(p, cut, worker);
#endif
}

template <class T, int D, int kRows>
void start_wgmma_fp8_attention(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  using Attention = WgmmaFp8Attention<T, D, kRows>;
  start_on_tensor_cores<Attention>(wgmma_fp8_attention_kernel<Attention>, p, cut, stream);
}

// Of one head dimension; defined in a file of its own for each, so that they compile side by side.
template <int D>
void wgmma_fp8_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    if (cut.rows == 16) return start_wgmma_fp8_attention<T, D, 16>(p, cut, stream);
    start_wgmma_fp8_attention<T, D, 32>(p, cut, stream);
  });
}

}  // namespace specdec
