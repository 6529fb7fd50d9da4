// tree_attention with wgmma for 128 rows of a KV head: two consumer warpgroups of 64 rows each and four producer warps
// a block, one block per multiprocessor. The two drift apart by themselves, so that the tensor cores have work while
// exponentials are computed. What was cut is merged by a second launch (merge_parts.cu).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "attention/launch.h"
#include "attention/warp_rows.cuh"
#include "attention/wide/kv_stream.cuh"
#include "core/wgmma.cuh"

namespace specdec::wide {

template <class T, int D, int kTokens, int kStages>
class WgmmaAttention {
 public:
  static constexpr int kGroups = 2, kGroupThreads = 128, kGroupRows = 64, kRows = kGroups * kGroupRows;
  static constexpr int kConsumers = kGroups * 4, kProducers = kTokens / kWarp;  // warps
  // Whole warpgroups where they change their registers.
  static constexpr int kThreads = 3 * kGroupThreads;
  static constexpr int kWords = kTokens / 64;
  static_assert(kWords <= 2);
  // Three warpgroups have 168 registers a thread when they start: sums, scores and weights take more.
  static constexpr int kConsumerRegisters = D == 256 ? 216 : 208, kProducerRegisters = 504 - 2 * kConsumerRegisters;
  using Stream = KvStream<kTokens, 2 * D, kStages, kConsumers, kProducers>;
  using QueryTile = Stage<kGroupRows, 2 * D>;  // of which k is used

  struct Shared {
    Stream stream;
    alignas(1024) unsigned char q[kGroups][kGroupRows * 2 * D];
  };

  __device__ WgmmaAttention(Shared& shared, const TreeAttentionParams& p, const Cut& cut, int lane_of_worker)
      : shared_(shared), stream_(shared.stream), p_(p), cut_(cut), lane_of_worker_(lane_of_worker) {}

  // A consumer warp's whole life.
  __device__ void consume() {
    Turn<Stream::kSegments> turn;
    wait_for_kernels_before();
    while (true) {
      stream_.announced[turn.at].wait(turn.parity);
      const Segment& s = stream_.segments[turn.at];
      if (s.head < 0) return;
      sum_segment(s);
      __syncwarp();
      turn.advance();
    }
  }

 private:
  using MultiplyK = Wgmma<T, kTokens, cute::SM90::GMMA::Major::K>;
  using MultiplyV = Wgmma<T, D, cute::SM90::GMMA::Major::MN>;
  using Scores = float[kTokens / 8][4];
  using Weights = uint32_t[kTokens / 16][4];

  // Which tokens of a tile two rows see.
  struct Seen {
    bool all;
    uint64_t bits[kWords][2];
  };

  __device__ void sum_segment(const Segment& s) {
    const int first_row = s.first_row + lane_of_worker_ * kRows + group_ * kGroupRows;
    load_q(s, first_row);

    WarpRows<D> rows;
    rows.clear();
    Scores scores;
    Weights weights;
    int tile = s.first_tile;
    const int end_tile = s.end_tile;
    Seen seen = wait_for_tile(s, first_row, tile);
    cute::warpgroup_arrive();
    multiply_k(stage_.at, scores);
    cute::warpgroup_wait<0>();
    pin(scores);
    rows.follow(weigh(seen, scores, rows));
    pack_weights(scores, weights);

    while (++tile < end_tile) {
      const int before = stage_.at;
      stage_.advance();
      seen = wait_for_tile(s, first_row, tile);
      pin(rows.out);
      cute::warpgroup_arrive();
      multiply_k(stage_.at, scores);
      add_v(before, weights, rows);
      cute::warpgroup_wait<1>();
      pin(scores);
      const auto fall = weigh(seen, scores, rows);
      cute::warpgroup_wait<0>();
      pin(rows.out);
      pin(scores);  // the weights' registers are free
      release(before);
      rows.follow(fall);
      pack_weights(scores, weights);
    }
    pin(rows.out);
    cute::warpgroup_arrive();
    add_v(stage_.at, weights, rows);
    cute::warpgroup_wait<0>();
    pin(rows.out);
    release(stage_.at);
    stage_.advance();
    write(s, rows);
  }

  __device__ void release(int stage) {
    if (threadIdx.x % kWarp == 0) stream_.empty[stage].arrive();
  }

  __device__ void sync_group() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + group_) : "memory"); }

  // What was written to shared memory by plain stores and cp.async, and waited for, is there for wgmma too.
  __device__ static void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  // The group's rows of q; zeros for those behind the request.
  __device__ void load_q(const Segment& s, int first_row) {
    constexpr int kPieces = D / 8;
    const int end = s.request.valid_rows * cut_.group.divisor;
    const T* q = static_cast<const T*>(p_.q) + s.request.q_start;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared_.q[group_]));
    sync_group();  // nobody multiplies by the segment before any more
#pragma unroll 4
    for (int n = threadIdx.x % kGroupThreads; n < kGroupRows * kPieces; n += kGroupThreads) {
      const int row = n / kPieces, piece = n % kPieces;
      const QueryRow at = query_row(cut_, s.head, first_row + row);
      const bool valid = first_row + row < end;
      const T* from = valid ? q + at.row * p_.q_strides.row + at.head * p_.q_strides.head + piece * 8 : q;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + QueryTile::offset(row, piece)), "l"(from),
                   "r"(valid ? 16 : 0)
                   : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    show_to_wgmma();
    sync_group();
  }

  // Of rows lane / 4 and lane / 4 + 8 of the warp.
  __device__ Seen wait_for_tile(const Segment& s, int first_row, int tile) {
    stream_.full[stage_.at].wait(stage_.parity);
    show_to_wgmma();
    Seen seen;
    const int64_t first = int64_t{tile} * kTokens;
    seen.all = first + kTokens <= s.request.prefix && first >= s.request.end - p_.window;
#pragma unroll
    for (int w = 0; w < kWords; ++w) seen.all &= stream_.rows_there(stage_.at, w) == ~uint64_t{0};
    if (seen.all) return seen;
    // Each lane looks at 64 tokens of one of the warp's rows.
    const int lane = threadIdx.x % kWarp, last = s.request.valid_rows * cut_.group.divisor - 1;
    const int i = cut_.group.div(min(first_row + warp_ * 16 + lane % 16, last)), my_word = lane / 16 % kWords;
    const uint64_t mine = visible_word(p_, s.request, i, first + 64 * my_word) & stream_.rows_there(stage_.at, my_word);
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int h = 0; h < 2; ++h) seen.bits[w][h] = __shfl_sync(kFullMask, mine, 16 * w + 8 * h + lane / 4);
    return seen;
  }

  // scores = q k^T.
  __device__ void multiply_k(int stage, Scores& scores) const {
    const uint64_t q = wgmma_operand(shared_.q[group_], 0), k = wgmma_operand(stream_.stages[stage].k, 0);
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      const int panel = d / 64, inside = d % 64 * 2;
      MultiplyK::multiply(q + ((panel * QueryTile::kPanel + inside) >> 4),
                          k + ((panel * Stream::Stage::kPanel + inside) >> 4), d > 0, scores);
    }
    cute::warpgroup_commit_batch();
  }

  // rows.out += weights v.
  __device__ void add_v(int stage, const Weights& weights, WarpRows<D>& rows) const {
    const uint64_t v = wgmma_operand(stream_.stages[stage].v, Stream::Stage::kPanel);
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) MultiplyV::multiply(weights[n], v + ((n * 16 * 128) >> 4), true, rows.out);
    cute::warpgroup_commit_batch();
  }

  __device__ auto weigh(const Seen& seen, Scores& scores, WarpRows<D>& rows) const {
    const Scale scale = rows.cap(p_, {p_.log2_scale, p_.log2_scale}, scores);
    if (!seen.all)
#pragma unroll
      for (int w = 0; w < kWords; ++w) rows.hide(seen.bits[w], reinterpret_cast<float (&)[8][4]>(scores[8 * w]));
    return rows.weigh(scale, scores);
  }

  __device__ static void pack_weights(const Scores& scores, Weights& weights) {
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          weights[n][2 * c + h] = pack<T>(scores[2 * n + c][2 * h], scores[2 * n + c][2 * h + 1]);
  }

  // Straight from registers: four lanes have a sector of partial results, half a one of the output.
  __device__ void write(const Segment& s, WarpRows<D>& rows) const {
    rows.finish();
    const int lane = threadIdx.x % kWarp, end = s.request.valid_rows * cut_.group.divisor;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = group_ * kGroupRows + warp_ * 16 + lane / 4 + 8 * h,
                n = s.first_row + lane_of_worker_ * kRows + row;
      if (n >= end) continue;
      const float max = rows.max[h], sum = rows.sum[h];
      if (s.part < 0) {
        const QueryRow at = query_row(cut_, s.head, n);
        const float factor = sum == 0 ? 0 : p_.v_scale / sum;
        T* out = static_cast<T*>(p_.out) + s.request.out_start + at.row * p_.out_strides.row +
                 at.head * p_.out_strides.head + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < D / 8; ++d)
          *reinterpret_cast<uint32_t*>(out + 8 * d) =
              pack<T>(rows.out[d][2 * h] * factor, rows.out[d][2 * h + 1] * factor);
        if (lane % 4 == 0) store_lse(p_, s.request, at, max, sum);
      } else {
        float* part = part_of(p_, cut_, static_cast<int64_t>(s.part) * cut_.lanes + lane_of_worker_, D);
#pragma unroll
        for (int d = 0; d < D / 8; ++d)
          *reinterpret_cast<float2*>(part + row * D + 8 * d + lane % 4 * 2) =
              make_float2(rows.out[d][2 * h], rows.out[d][2 * h + 1]);
        if (lane % 4 == 0) {
          part[kRows * D + row] = max;
          part[kRows * (D + 1) + row] = sum;
        }
      }
    }
  }

  Shared& shared_;
  Stream& stream_;
  const TreeAttentionParams& p_;
  const Cut& cut_;
  const int lane_of_worker_;
  const int group_ = static_cast<int>(threadIdx.x) / kGroupThreads, warp_ = static_cast<int>(threadIdx.x) / kWarp % 4;
  Turn<kStages> stage_;
};

template <class T, int D, int kTokens, int kStages>
__global__ void __launch_bounds__(WgmmaAttention<T, D, kTokens, kStages>::kThreads, 1)
    wgmma_attention_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Attention = WgmmaAttention<T, D, kTokens, kStages>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) shared.stream.init();
  __syncthreads();
  const int worker = blockIdx.x / cut.lanes, lane_of_worker = blockIdx.x % cut.lanes;
  const int warp = threadIdx.x / kWarp;
  if (warp < Attention::kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<Attention::kConsumerRegisters>();
    Attention(shared, p, cut, lane_of_worker).consume();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Attention::kProducerRegisters>();
    if (warp < Attention::kConsumers + Attention::kProducers) shared.stream.produce(p, cut, worker);
  }
#endif
}

template <class T, int D, int kTokens, int kStages>
void start_wgmma_attention(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  using Attention = WgmmaAttention<T, D, kTokens, kStages>;
  const auto kernel = wgmma_attention_kernel<T, D, kTokens, kStages>;
  const LaunchShape shape{.grid = static_cast<unsigned>(cut.max_workers * cut.lanes),
                          .threads = Attention::kThreads,
                          .shared_bytes = sizeof(typename Attention::Shared)};
  allow_shared_bytes(kernel, shape.shared_bytes);
  launch("tree_attention", kernel, shape, stream, p, cut);
}

}  // namespace specdec::wide
