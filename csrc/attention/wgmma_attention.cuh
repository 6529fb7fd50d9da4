// tree_attention with wgmma (compute capability 9.0). One consumer warpgroup for up to 64 rows of a KV head, two for
// more, each of which multiplies the weights of a tile by its V while it turns the scores of the next one into weights;
// two of them drift apart by themselves, so that the tensor cores have work while exponentials are computed. Two or
// four producer warps; of 8-bit pools two, and two that widen. Grid: lanes x max_workers blocks, one or two per
// multiprocessor. Bytes: the KV of each request once per `lanes` row tiles; neighbouring lanes walk it in step and meet
// it in the L2.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "attention/kv_stream.cuh"
#include "attention/launch.h"
#include "attention/merge_parts.cuh"
#include "attention/widened_stream.cuh"
#include "core/wgmma.cuh"

namespace specdec {

// Query rows of T, pools of Kv. Of pools of 8 bits, kStages are those of 8 bits, and there are kKeys and kValues wide
// tiles besides.
template <class T, class Kv, int D, int kGroups, int kTokens, int kStages, int kBlocks_, int kKeys = 0, int kValues = 0>
class WgmmaAttention {
 public:
  static constexpr bool kFp8 = std::is_same_v<Kv, Float8>;
  static constexpr int kBlocks = kBlocks_;  // that a multiprocessor has room for
  static constexpr int kGroupRows = 64, kGroupThreads = 128, kRows = kGroups * kGroupRows;
  static constexpr int kConsumers = kGroups * 4, kProducers = kFp8 || kBlocks == 2 ? 2 : 4;  // warps
  static constexpr int kThreads = (kConsumers + kProducers + (kFp8 ? kWideners : 0)) * kWarp;
  // Three warpgroups have 168 registers a thread when they start, and four 128: sums, scores and weights take more.
  static constexpr bool kMovesRegisters = kGroups == 2 || (kFp8 && kBlocks == 2);
  static constexpr int kConsumerRegisters = kGroups == 1 ? 168 : kFp8 ? 216 : 208;
  static constexpr int kProducerRegisters = kGroups == 2 && kFp8 ? 72 : 88;
  // Two blocks of a worker may be a cluster, in which each copies half of every tile for both. One warpgroup gets its
  // KV as fast from plain copies.
  static constexpr bool kPairs = kGroups == 2 && !kFp8;
  static constexpr int kWords = kTokens / 64;
  static_assert(kWords <= 2);
  using Stream = std::conditional_t<kFp8, WidenedStream<kTokens, D, kKeys, kValues, kStages, kConsumers>,
                                    KvStream<kTokens, 2 * D, kStages, kConsumers, kProducers, kGroups == 2>>;
  using QueryTile = Stage<kGroupRows, 2 * D>;  // of which k is used

  struct Shared {
    Stream stream;
    alignas(1024) unsigned char q[kGroups][kGroupRows * 2 * D];
  };

  __device__ WgmmaAttention(Shared& shared, const TreeAttentionParams& p, const Cut& cut, int lane_of_worker)
      : shared_(shared), stream_(shared.stream), p_(p), cut_(cut), lane_of_worker_(lane_of_worker) {}

  // A consumer warp's whole life.
  __device__ void consume() {
    wait_for_kernels_before();
    write_unseen_rows<T, D, kConsumers * kWarp>(p_, cut_);
    if constexpr (kPairs) Cluster::wait();
    while (true) {
      const Segment& s = wait_for_segment();
      if (s.head < 0) return;
      const int turn = turn_.at;
      turn_.advance();
      if (s.merge)
        merge_group<T, D, kConsumers * kWarp>(p_, cut_, s, lane_of_worker_, sync_consumers);
      else
        do_segment(s);
      __syncwarp();
      if (threadIdx.x % kWarp == 0) stream_.read[turn].arrive();
    }
  }

 private:
  using Place = typename Stream::Place;
  using Factor = std::conditional_t<kFp8, Half, T>;  // what is multiplied
  static constexpr bool kMakesHalf = !std::is_same_v<T, Factor>;
  using MultiplyK = Wgmma<Factor, kTokens, cute::SM90::GMMA::Major::K>;
  using MultiplyV = Wgmma<Factor, D, cute::SM90::GMMA::Major::MN>;
  using Scores = float[kTokens / 8][4];
  using Weights = uint32_t[kTokens / 16][4];

  // Which tokens of a tile two rows see.
  struct Seen {
    bool all;
    uint64_t bits[kWords][2];
  };

  // The next one.
  __device__ const Segment& wait_for_segment() {
    stream_.announced[turn_.at].wait(turn_.parity);
    return stream_.segments[turn_.at];
  }

  __device__ void do_segment(const Segment& s) {
    WarpRows<D> rows;
    rows.clear();
    sum_tiles(s, rows);
    write(s, rows);
    if (s.parts > 1 && s.last) leave_part<D>(p_, cut_, s, lane_of_worker_, sync_consumers);
  }

  __device__ void sum_tiles(const Segment& s, WarpRows<D>& rows) {
    if (!asked_for_q_) ask_for_q(s);
    wait_for_q();
    Scores scores;
    Weights weights;
    int tile = s.first_tile;
    const int end_tile = s.end_tile;
    wait_for_k();
    cute::warpgroup_arrive();
    multiply_k(scores);
    Seen seen = seen_of(s, tile);
    cute::warpgroup_wait<0>();
    pin(scores);
    leave_k();
    rows.follow(weigh(seen, scores, rows));
    pack_weights<Factor>(scores, weights);

    while (++tile < end_tile) {
      const Place before = place_;
      place_.advance();
      wait_for_v(before);
      wait_for_k();
      pin(rows.out);
      cute::warpgroup_arrive();
      multiply_k(scores);
      add_v(before, weights, rows);
      seen = seen_of(s, tile);
      cute::warpgroup_wait<1>();
      pin(scores);
      leave_k();
      const auto fall = weigh(seen, scores, rows);
      // Never so, which the compiler does not know: else it waits before it computes exponentials. (Of one warpgroup it
      // then waits for each product.)
      if constexpr (kGroups == 2)
        if (rows.sum[0] < 0 || rows.sum[1] < 0) __trap();
      cute::warpgroup_wait<0>();
      pin(rows.out);
      pin(scores);  // the weights' registers are free
      leave_v(before);
      rows.follow(fall);
      pack_weights<Factor>(scores, weights);
    }
    wait_for_v(place_);
    pin(rows.out);
    cute::warpgroup_arrive();
    add_v(place_, weights, rows);
    const Segment& next = wait_for_segment();
    asked_for_q_ = next.head >= 0 && !next.merge;
    if (asked_for_q_) ask_for_q(next);
    cute::warpgroup_wait<0>();
    pin(rows.out);
    leave_v(place_);
    place_.advance();
    rows.finish();
  }

  __device__ static void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * kWarp) : "memory"); }
  __device__ void sync_group() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kGroups == 1 ? 1 : 2 + group_), "n"(kGroupThreads) : "memory");
  }

  // K and V of a tile, which come and go together unless the stream has them apart. Who has widened them has shown them
  // to wgmma.
  __device__ void wait_for_k() const {
    const auto at = place_.key();
    stream_.full[at.at].wait(at.parity);
    if constexpr (!kFp8) show_to_wgmma();
  }
  __device__ void wait_for_v(Place place) const {
    if constexpr (Stream::kApart) {
      const auto at = place.value();
      stream_.full_v[at.at].wait(at.parity);
      if constexpr (!kFp8) show_to_wgmma();
    }
  }
  __device__ void leave_k() const {
    if constexpr (kFp8) __syncwarp();
    if constexpr (Stream::kApart) leave(stream_.empty[place_.key().at]);
  }
  __device__ void leave_v(Place place) const {
    if constexpr (Stream::kApart)
      leave(stream_.empty_v[place.value().at]);
    else
      leave(stream_.empty[place.value().at]);
  }
  // Both blocks of a cluster copy what it reads.
  __device__ void leave(Mbarrier& empty) const {
    if constexpr (kPairs)
      empty.arrive_at_each(threadIdx.x % kWarp, blocks_);
    else if (threadIdx.x % kWarp == 0)
      empty.arrive();
  }

  // Of the group's rows in a segment, the first.
  __device__ int first_row(const Segment& s) const {
    return s.first_row + lane_of_worker_ * kRows + group_ * kGroupRows;
  }

  // Begins to load the group's rows of q; zeros for those behind the request.
  __device__ void ask_for_q(const Segment& s) {
    constexpr int kPieces = D / 8;
    const int first = first_row(s), end = s.request.valid_rows * cut_.group.divisor;
    const T* q = static_cast<const T*>(p_.q) + s.request.q_start;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared_.q[group_]));
    sync_group();  // nobody multiplies by the segment before any more
#pragma unroll 4
    for (int n = threadIdx.x % kGroupThreads; n < kGroupRows * kPieces; n += kGroupThreads) {
      const int row = n / kPieces, piece = n % kPieces;
      const QueryRow at = query_row(cut_, s.head, first + row);
      const bool valid = first + row < end;
      const T* from = valid ? q + at.row * p_.q_strides.row + at.head * p_.q_strides.head + piece * 8 : q;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + QueryTile::offset(row, piece)), "l"(from),
                   "r"(valid ? 16 : 0)
                   : "memory");
    }
  }
  __device__ void wait_for_q() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if constexpr (kMakesHalf) {
      sync_group();
      scale_ = make_half<D, QueryTile>(shared_.q[group_], 16 * warp_, p_.log2_scale);
    }
    show_to_wgmma();
    sync_group();
  }

  // Of rows lane / 4 and lane / 4 + 8 of the warp.
  __device__ Seen seen_of(const Segment& s, int tile) const {
    Seen seen;
    const int64_t first = int64_t{tile} * kTokens;
    seen.all = first + kTokens <= s.request.prefix && first >= s.request.end - p_.window;
#pragma unroll
    for (int w = 0; w < kWords; ++w) seen.all &= stream_.rows_there(place_.key().at, w) == ~uint64_t{0};
    if (seen.all) return seen;
    // Each lane looks at 64 tokens of one of the warp's rows.
    const int lane = threadIdx.x % kWarp, last = s.request.valid_rows * cut_.group.divisor - 1;
    const int i = cut_.group.div(min(first_row(s) + warp_ * 16 + lane % 16, last)), my_word = lane / 16 % kWords;
    const uint64_t mine =
        visible_word(p_, s.request, i, first + 64 * my_word) & stream_.rows_there(place_.key().at, my_word);
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int h = 0; h < 2; ++h) seen.bits[w][h] = __shfl_sync(kFullMask, mine, 16 * w + 8 * h + lane / 4);
    return seen;
  }

  // scores = q k^T.
  __device__ void multiply_k(Scores& scores) const {
    const WarpOperand q(wgmma_operand(shared_.q[group_], 0));
    const WarpOperand k(wgmma_operand(stream_.keys(place_.key().at), 0));
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      const int panel = d / 64, inside = d % 64 * 2;
      MultiplyK::multiply(q.behind(panel * QueryTile::kPanel + inside),
                          k.behind(panel * Stream::Stage::kPanel + inside), d > 0, scores);
    }
    cute::warpgroup_commit_batch();
  }

  // rows.out += weights v.
  __device__ void add_v(Place place, const Weights& weights, WarpRows<D>& rows) const {
    const WarpOperand v(wgmma_operand(stream_.values(place.value().at), Stream::Stage::kPanel));
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) MultiplyV::multiply(weights[n], v.behind(n * 16 * 128), true, rows.out);
    cute::warpgroup_commit_batch();
  }

  __device__ auto weigh(const Seen& seen, Scores& scores, WarpRows<D>& rows) const {
    const Scale scale = rows.cap(p_, kMakesHalf ? scale_ : Scale{p_.log2_scale, p_.log2_scale}, scores);
    if (!seen.all)
#pragma unroll
      for (int w = 0; w < kWords; ++w) rows.hide(seen.bits[w], reinterpret_cast<float (&)[8][4]>(scores[8 * w]));
    return rows.weigh(scale, scores);
  }

  // Straight from registers, in pieces of 64 bytes a row: four neighbouring lanes have eight columns of a row, and of
  // several such eights each lane takes those of one or one half.
  __device__ void write(const Segment& s, const WarpRows<D>& rows) const {
    const int lane = threadIdx.x % kWarp, end = s.request.valid_rows * cut_.group.divisor;
    const int first_of_block = s.first_row + lane_of_worker_ * kRows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = group_ * kGroupRows + warp_ * 16 + lane / 4 + 8 * h;
      const bool valid = first_of_block + row < end;
      const float max = rows.max[h], sum = rows.sum[h];
      if (s.parts == 1) {
        const QueryRow at = query_row(cut_, s.head, first_of_block + row);
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
        float* part = part_of(p_, cut_, s.part, lane_of_worker_, D);
        float* to = part + row * D + lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll
        for (int d = 0; d < D / 8; d += 2) {
          float a[2] = {rows.out[d][2 * h], rows.out[d][2 * h + 1]};
          float b[2] = {rows.out[d + 1][2 * h], rows.out[d + 1][2 * h + 1]};
#pragma unroll
          for (int e = 0; e < 2; ++e) swap_across(lane & 1, 1, a[e], b[e]);
          if (valid) *reinterpret_cast<float4*>(to + 8 * d) = make_float4(a[0], a[1], b[0], b[1]);
        }
        if (valid && lane % 4 == 0) {
          part[kRows * D + row] = max;
          part[kRows * (D + 1) + row] = sum;
        }
      }
    }
  }

  // Lanes of two that differ by `step`: the lower one's b changes places with the upper one's a.
  template <class X>
  __device__ static void swap_across(bool upper, int step, X& a, X& b) {
    const X other = __shfl_xor_sync(kFullMask, upper ? a : b, step);
    (upper ? a : b) = other;
  }

  Shared& shared_;
  Stream& stream_;
  const TreeAttentionParams& p_;
  const Cut& cut_;
  const int lane_of_worker_;
  const unsigned blocks_ = kPairs ? Cluster::size() : 1;  // of the cluster
  // Known to be the same for a warp, so that operands' places are computed once for all its lanes.
  const int group_ = kGroups == 1 ? 0 : __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp % 4;
  Turn<Stream::kSegments> turn_;  // of the next segment
  Place place_;
  bool asked_for_q_ = false;  // of the next segment
  Scale scale_;               // of scores, where rows of q had to be made Half
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocks)
    wgmma_attention_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut,
                           const __grid_constant__ PoolMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) {
    shared.stream.init();
    if constexpr (Attention::kPairs) Cluster::show_barriers();
  }
  __syncthreads();
  if constexpr (Attention::kPairs) Cluster::arrive_relaxed();
  const int worker = blockIdx.x / cut.lanes, lane_of_worker = blockIdx.x % cut.lanes;
  const int warp = threadIdx.x / kWarp;
  if (warp < Attention::kConsumers) {
    if constexpr (Attention::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<Attention::kConsumerRegisters>();
    Attention(shared, p, cut, lane_of_worker).consume();
  } else {
    if constexpr (Attention::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<Attention::kProducerRegisters>();
    if constexpr (Attention::kFp8)
      if (warp >= Attention::kConsumers + Attention::kProducers) return shared.stream.widen_all();
    if constexpr (Attention::kPairs) Cluster::wait();
    shared.stream.produce(p, cut, worker, &maps);
  }
#endif
}

template <class Attention>
void start_wgmma_attention(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  start_on_tensor_cores<Attention>(wgmma_attention_kernel<Attention>, p, cut, stream, pool_maps_of(p));
}

// Of one head dimension; defined in a file of its own for each, so that they compile side by side.
template <int D>
void wgmma_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    // As many stages as fit: two blocks share a multiprocessor's 228 KB, or one has 227.
    constexpr int kFew = wgmma_tokens(D, 64), kMany = wgmma_tokens(D, 128);
    constexpr int kManyStages = D == 64 ? 6 : D == 128 ? 3 : 2, kFewStages = D == 256 ? 3 : 6;
    if (cut.rows == 128)
      return start_wgmma_attention<WgmmaAttention<T, T, D, 2, kMany, kManyStages, 1>>(p, cut, stream);
    if constexpr (D < 256)
      if (cut.blocks == 2) return start_wgmma_attention<WgmmaAttention<T, T, D, 1, kFew, 3, 2>>(p, cut, stream);
    start_wgmma_attention<WgmmaAttention<T, T, D, 1, kFew, kFewStages, 1>>(p, cut, stream);
  });
}

// The same of 8-bit pools: of stages of 8 bits what there is room for.
template <int D>
void wgmma_widened_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  with_16_bit_type(p.dtype, [&]<class T>() {
    constexpr int kFew = wgmma_tokens(D, 64), kMany = wgmma_tokens(D, 128);
    constexpr int kManyStages = D == 64 ? 8 : D == 128 ? 2 : 1;
    if (cut.rows == 128)
      return start_wgmma_attention<WgmmaAttention<T, Float8, D, 2, kMany, kManyStages, 1, 2, 2>>(p, cut, stream);
    if constexpr (D == 256)
      start_wgmma_attention<WgmmaAttention<T, Float8, D, 1, kFew, 2, 1, 2, 2>>(p, cut, stream);
    else
      start_wgmma_attention<WgmmaAttention<T, Float8, D, 1, kFew, 3, 2, 1, 2>>(p, cut, stream);
  });
}

}  // namespace specdec
