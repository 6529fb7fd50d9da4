// mla_tree_attention with wgmma (compute capability 9.0): latent rows of 512 + 64 elements of 16 or 8 bits, 64 rows
// (query rows times heads) per block.
//
// The accumulator, 64 x 512 floats, fills half of the SM's registers, so two consumer warpgroups hold a half of the
// columns each. The first one ("scores") computes the scores of a KV tile, their softmax, and multiplies the weights,
// from registers, by the left half of the tile as V. It hands the weights to the second one ("values") through shared
// memory, which multiplies them by the right half. So the tile is read once for K and both halves of V, and the second
// warpgroup's product runs next to the first one's and next to the scores of the following tile. Four producer warps
// copy tiles (latent_ring.cuh). Grid: row_tiles x workers persistent blocks, one per SM; the blocks of a worker read
// the same KV in step, from the L2. Split KV is merged in the same launch (attention/common/merge.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "attention/common/launch.cuh"
#include "attention/common/merge.cuh"
#include "core/cluster.cuh"
#include "core/wgmma.cuh"
#include "mla/kernels.h"
#include "mla/sm90/latent_ring.cuh"

namespace specdec::mla {

using attention::OnlineSoftmax;
using attention::PartialsCounter;
using attention::QueryRow;
using attention::Scale;

// T: type of queries and outputs. Row: that of the pool's elements, or Row656.
// kSlim: see slim.cuh.
template <class T, class Row, bool kSlim>
class WgmmaAttention {
 public:
  static constexpr bool kIsSlim = kSlim;
  using Ring = LatentRing<T, Row, kSlim>;
  static constexpr int kRows = 64, kTokens = LatentTile::kTokens, kLatent = LatentTile::kLatent, kHalf = kLatent / 2;
  static constexpr int kWarpgroupThreads = 128, kConsumerThreads = 2 * kWarpgroupThreads;
  static constexpr int kThreads = kConsumerThreads + Ring::kProducers * kWarp;
  static constexpr int kConsumerRegisters = 208, kProducerRegisters = 88;
  static constexpr int kPanelBytes = kRows * 128;                 // of queries and weights: 64 elements of each row
  static constexpr int kChunk = 128, kChunks = kLatent / kChunk;  // columns of a merge unit, and units of a row

  struct Shared {
    Ring ring;
    alignas(1024) unsigned char q[LatentTile::kWidth / 64 * kPanelBytes];
    alignas(1024) unsigned char weights[kPanelBytes];
    Ring::Control control;
    float factors[kRows];  // by which outputs are rescaled before the weights are applied; at the end sums of weights
    Mbarrier q_full, weights_full, weights_empty;

    __device__ void init() {
      control.init();
      q_full.init(kWarpgroupThreads);
      weights_full.init(kWarpgroupThreads / kWarp);
      weights_empty.init(kWarpgroupThreads / kWarp);
    }
  };
  static_assert(sizeof(Shared) <= 227 * 1024);

  __device__ WgmmaAttention(Shared& shared, const MlaTreeAttentionParams& p, const DevicePlan& plan, int row_tile)
      : shared_(shared), p_(p), plan_(plan), row_tile_(row_tile) {}

  // Write what no segment covers, by all producer warps but the first, which meanwhile finds the first segment.
  __device__ static void write_rows_without_kv(const MlaTreeAttentionParams& p, const DevicePlan& plan) {
    constexpr int kFirst = kConsumerThreads + kWarp;
    if (threadIdx.x < kFirst) return;
    wait_for_kernels_before();
    attention::write_rows_without_kv<T, kLatent, kThreads - kFirst>(p, plan, threadIdx.x - kFirst);
    __syncwarp();
  }

  // Run a warp of the first warpgroup, if kScores, or of the second, until its share is done.
  template <bool kScores>
  __device__ __forceinline__ void consume() {
    wait_for_kernels_before();
#pragma unroll 1
    while (true) {
      const Segment& s = wait_for_segment();
      if (s.kv_head < 0 || s.merge) return;
      const int turn = segment_.at;
      segment_.advance();
      if constexpr (kScores)
        do_scores(s);
      else
        do_values(s);
      if (s.splits > 1 && s.last) attention::publish_partial<kLatent>(p_, plan_, s, row_tile_, sync_consumers);
      release_segment(turn);
    }
  }

  // Merge this worker's parts of split items. Call from all warps that consume, afterwards.
  __device__ __forceinline__ void merge_items() {
#pragma unroll 1
    while (true) {
      const Segment& s = wait_for_segment();
      if (s.kv_head < 0) return;
      const int turn = segment_.at;
      segment_.advance();
      merge(s);
      release_segment(turn);
    }
  }

 private:
  using QkMma = Wgmma<T, kTokens, cute::SM90::GMMA::Major::K>;
  using PvMma = Wgmma<T, kHalf, cute::SM90::GMMA::Major::MN>;
  using Scores = float[kTokens / 8][4];
  using Weights = uint32_t[kTokens / 16][4];
  using Output = float[kHalf / 8][4];

  // The tokens of a tile that two rows attend to.
  struct TileMask {
    bool all;
    uint64_t bits[2];
  };

  // --- first warpgroup

  __device__ __forceinline__ void do_scores(const Segment& s) {
    OnlineSoftmax<kHalf> rows;
    rows.clear();
    shared_.q_full.wait(q_.parity);
    q_.advance();
    fence_for_wgmma();
    Scores scores;
    Weights weights;
    int tile = s.first_tile;
    const int end_tile = s.end_tile;
    multiply_qk(scores);
    TileMask visible = tile_mask_of(s, tile);
    cute::warpgroup_wait<0>();
    pin(scores);
    release(LatentTile::kRotated, stage_.at);
    weigh(visible, scores, rows, weights);

    while (++tile < end_tile) {
      const int before = stage_.at;
      stage_.advance();
      pin(rows.out);
      accumulate_pv(before, weights, rows.out);
      multiply_qk(scores);
      visible = tile_mask_of(s, tile);
      cute::warpgroup_wait<1>();
      pin(rows.out);
      release(LatentTile::kLeft, before);
      cute::warpgroup_wait<0>();
      pin(scores);  // frees the registers of the weights
      release(LatentTile::kRotated, stage_.at);
      weigh(visible, scores, rows, weights);
    }
    pin(rows.out);
    accumulate_pv(stage_.at, weights, rows.out);
    cute::warpgroup_wait<0>();
    pin(rows.out);
    release(LatentTile::kLeft, stage_.at);
    stage_.advance();
    rows.finish();
    hand_over(rows.sum);
    write<true>(s, rows.out, rows.max, rows.sum);
  }

  // Turn scores into weights, hand these to the second warpgroup, and rescale the output for them.
  __device__ __forceinline__ void weigh(const TileMask& visible, Scores& scores, OnlineSoftmax<kHalf>& rows,
                                        Weights& weights) {
    if (!visible.all) rows.mask(visible.bits, scores);
    const auto rescale_by = rows.softmax(Scale{p_.log2_scale, p_.log2_scale}, scores);
    attention::pack_weights<T>(scores, weights);
    // Lane l holds, of rows l / 4 and + 8 of its warp, two tokens of every eight.
    const int lane = threadIdx.x % kWarp, row = warp_ * 16 + lane / 4;
    shared_.weights_empty.wait(weights_.parity ^ 1);
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned char* const to = shared_.weights + (row + 8 * h) * 128 + (n ^ lane / 4) * 16 + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = weights[n / 2][n % 2 * 2 + h];
      }
    publish_factors(rescale_by.factor);
    rows.rescale(rescale_by);
  }

  // Hand over one value per row with nothing else.
  __device__ __forceinline__ void hand_over(const float (&of)[2]) {
    shared_.weights_empty.wait(weights_.parity ^ 1);
    publish_factors(of);
  }
  __device__ __forceinline__ void publish_factors(const float (&of)[2]) {
    const int lane = threadIdx.x % kWarp, row = warp_ * 16 + lane / 4;
    if (lane % 4 == 0) {
      shared_.factors[row] = of[0];
      shared_.factors[row + 8] = of[1];
    }
    fence_for_wgmma();
    __syncwarp();
    if (lane == 0) shared_.weights_full.arrive();
    weights_.advance();
  }

  // Issue scores = q k^T, each part as soon as it is in shared memory.
  __device__ __forceinline__ void multiply_qk(Scores& scores) const {
    const WarpOperand q(wgmma_operand(shared_.q, 0));
    constexpr int kOrder[] = {LatentTile::kRotated, LatentTile::kLeft, LatentTile::kRight};
    bool add = false;
#pragma unroll
    for (int n = 0; n < LatentTile::kParts; ++n) {
      const int part = kOrder[n];
      wait_for(part);
      const WarpOperand k(operand(stage_.at, part, 0));
      if (n == 0) cute::warpgroup_arrive();
#pragma unroll
      for (int panel = 0; panel < LatentTile::panels(part); ++panel)
#pragma unroll
        for (int i = 0; i < 4; ++i, add = true)
          QkMma::multiply(q.offset((LatentTile::first_panel(part) + panel) * kPanelBytes + 32 * i),
                          k.offset(panel * LatentTile::kPanelBytes + 32 * i), add, scores);
    }
    cute::warpgroup_commit_batch();
  }

  // Issue out += weights v, with the left half of the tile.
  __device__ __forceinline__ void accumulate_pv(int stage, const Weights& weights, Output& out) const {
    const WarpOperand v(operand(stage, LatentTile::kLeft, LatentTile::kPanelBytes));
    cute::warpgroup_arrive();
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n)
      PvMma::multiply(weights[n], v.offset(2 * n * LatentTile::group_bytes(LatentTile::kLeft)), true, out);
    cute::warpgroup_commit_batch();
  }

  // Return what rows lane / 4 and lane / 4 + 8 of the warp attend to in a tile.
  __device__ __forceinline__ TileMask tile_mask_of(const Segment& s, int tile) const {
    TileMask visible;
    const int64_t first = int64_t{tile} * kTokens;
    const uint64_t present = *reinterpret_cast<const uint64_t*>(shared_.control.present[stage_.at]);
    visible.all = first + kTokens <= s.request.prefix && first >= s.request.end - p_.window && present == ~uint64_t{0};
    if (visible.all) return visible;
    const int lane = threadIdx.x % kWarp, last = s.request.valid_rows * plan_.gqa_group.divisor - 1;
    const int i = plan_.gqa_group.div(min(first_row(s) + warp_ * 16 + lane % 16, last));
    const uint64_t mine = visible_word(p_, s.request, i, first) & present;
#pragma unroll
    for (int h = 0; h < 2; ++h) visible.bits[h] = __shfl_sync(kFullMask, mine, 8 * h + lane / 4);
    return visible;
  }

  // --- second warpgroup

  __device__ __forceinline__ void do_values(const Segment& s) {
    if (!q_load_started_) load_q(s);
    OnlineSoftmax<kHalf> rows;  // its output only
    rows.clear();
    const int lane = threadIdx.x % kWarp, row = warp_ * 16 + lane / 4;
    const WarpOperand weights(wgmma_operand(shared_.weights, 0));
#pragma unroll 1
    for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
      shared_.weights_full.wait(weights_.parity);
      typename OnlineSoftmax<kHalf>::Rescale rescale_by;
      rescale_by.factor[0] = shared_.factors[row];
      rescale_by.factor[1] = shared_.factors[row + 8];
      rescale_by.any = __any_sync(kFullMask, rescale_by.factor[0] != 1 || rescale_by.factor[1] != 1) != 0;
      rows.rescale(rescale_by);
      wait_for(LatentTile::kRight);
      const WarpOperand v(operand(stage_.at, LatentTile::kRight, LatentTile::kPanelBytes));
      pin(rows.out);
      cute::warpgroup_arrive();
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n)
        PvMma::multiply(weights.offset(32 * n), v.offset(2 * n * LatentTile::group_bytes(LatentTile::kRight)), true,
                        rows.out);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      pin(rows.out);
      release(LatentTile::kRight, stage_.at);
      release_weights();
      stage_.advance();
    }
    // The first warpgroup has multiplied the last of the queries.
    const Segment& next = wait_for_segment();
    q_load_started_ = next.kv_head >= 0 && !next.merge;
    if (q_load_started_) load_q(next);
    shared_.weights_full.wait(weights_.parity);
    const float sum[2] = {shared_.factors[row], shared_.factors[row + 8]};
    release_weights();
    write<false>(s, rows.out, sum, sum);
  }

  __device__ __forceinline__ void release_weights() {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) shared_.weights_empty.arrive();
    weights_.advance();
  }

  // Start loading the block's rows of q, with zeros past the request.
  __device__ __forceinline__ void load_q(const Segment& s) {
    constexpr int kPieces = LatentTile::kWidth / 8;
    const int first = first_row(s), end = s.request.valid_rows * plan_.gqa_group.divisor;
    const T* q = static_cast<const T*>(p_.q) + s.request.q_start;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared_.q));
#pragma unroll 4
    for (int n = threadIdx.x % kWarpgroupThreads; n < kRows * kPieces; n += kWarpgroupThreads) {
      const int row = n / kPieces, piece = n % kPieces;
      const QueryRow at = attention::query_row(plan_, s.kv_head, first + row);
      const bool valid = first + row < end;
      const T* from = valid ? q + at.row * p_.q_strides.row + at.head * p_.q_strides.head + piece * 8 : q;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + piece / 8 * kPanelBytes + row * 128 +
                                                                         (piece % 8 ^ row % 8) * 16),
                   "l"(from), "r"(valid ? 16 : 0)
                   : "memory");
    }
    shared_.q_full.arrive_after_copies();
  }

  // --- both

  // Wait for the next segment and return it.
  __device__ __forceinline__ const Segment& wait_for_segment() {
    shared_.control.segment_full[segment_.at].wait(segment_.parity);
    return shared_.control.segments[segment_.at];
  }
  __device__ __forceinline__ void release_segment(int turn) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) shared_.control.segment_empty[turn].arrive();
  }
  __device__ __forceinline__ void wait_for(int part) const {
    shared_.control.full[stage_.at][part].wait(stage_.parity);
    fence_for_wgmma();  // some tokens may have come by cp.async
  }
  // Release a part of a stage: one lane of each warp arrives, without a branch.
  __device__ __forceinline__ void release(int part, int stage) const {
    shared_.control.empty[stage][part].arrive_at_each(threadIdx.x % kWarp, 1);
  }
  __device__ static void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory"); }

  // Return the operand of a part of a stage: K with panel_bytes 0, V with the distance of its panels.
  __device__ __forceinline__ uint64_t operand(int stage, int part, int panel_bytes) const {
    return wgmma_operand(shared_.ring.stages[stage].bytes + LatentTile::start(part), panel_bytes,
                         LatentTile::group_bytes(part));
  }

  // Return the block's first row in a segment.
  __device__ __forceinline__ int first_row(const Segment& s) const { return s.first_row + row_tile_ * kRows; }

  // Write this warpgroup's half of the rows straight from registers, two columns at a time: the partial result of an
  // item that is split, else out. `maxima` are only read by the first warpgroup.
  template <bool kScores>
  __device__ __forceinline__ void write(const Segment& s, const Output& outputs, const float (&maxima)[2],
                                        const float (&sums)[2]) const {
    const int lane = threadIdx.x % kWarp, end = s.request.valid_rows * plan_.gqa_group.divisor;
    const int first_column = (kScores ? 0 : kHalf) + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_ * 16 + lane / 4 + 8 * h;
      const bool valid = first_row(s) + row < end;
      if (s.splits == 1) {
        const QueryRow at = attention::query_row(plan_, s.kv_head, first_row(s) + row);
        const float factor = sums[h] == 0 ? 0 : p_.v_scale / sums[h];
        T* out = static_cast<T*>(p_.out) + s.request.out_start + at.row * p_.out_strides.row +
                 at.head * p_.out_strides.head + first_column;
#pragma unroll
        for (int d = 0; d < kHalf / 8; ++d)
          if (const uint32_t x = attention::pack<T>(outputs[d][2 * h] * factor, outputs[d][2 * h + 1] * factor); valid)
            *reinterpret_cast<uint32_t*>(out + 8 * d) = x;
        if (kScores && valid && lane % 4 == 0) attention::store_lse(p_, s.request, at, maxima[h], sums[h]);
      } else {
        float* partial = attention::partial_of(p_, plan_, s.partial, row_tile_, kLatent);
        float* to = partial + row * kLatent + first_column;
#pragma unroll
        for (int d = 0; d < kHalf / 8; ++d)
          if (valid) *reinterpret_cast<float2*>(to + 8 * d) = make_float2(outputs[d][2 * h], outputs[d][2 * h + 1]);
        if (kScores && valid && lane % 4 == 0) {
          partial[kRows * kLatent + row] = maxima[h];
          partial[kRows * (kLatent + 1) + row] = sums[h];
        }
      }
    }
  }

  // --- merge

  // Merge this worker's part of an item whose KV several workers have read. A unit is 128 columns of a row; workers
  // have even shares of them. The factors of the partial results of a row come first, so that the loads of all units
  // are independent. With fixed_split, sums are in KV order: empty partial results then change no bits.
  __device__ __forceinline__ void merge(const Segment& s) {
    PartialsCounter counter(p_, plan_, s, row_tile_, kLatent);
    const bool waits = s.workers > 1 && threadIdx.x == 0;
    if (waits) counter.wait();
    sync_consumers();
    const int rows = max(min(kRows, s.request.valid_rows * plan_.gqa_group.divisor - first_row(s)), 0);
    const int begin = rows * kChunks * s.rank / s.workers, end = rows * kChunks * (s.rank + 1) / s.workers;
    const int capacity = static_cast<int>(sizeof(shared_.q) / sizeof(float2)) / s.splits;  // rows with factors
#pragma unroll 1
    for (int first = begin / kChunks; first * kChunks < end; first += capacity) {
      const int last = min(first + capacity, (end + kChunks - 1) / kChunks);
      find_factors(s, first, last, begin);
      sync_consumers();
      const int some_begin = max(begin, first * kChunks), some_end = min(end, last * kChunks);
      // All sums are in the same order.
      if (!kSlim && s.splits <= 2)
        add_partials<2, 8>(s, first, some_begin, some_end);
      else if (!kSlim && s.splits <= 4)
        add_partials<4, 2>(s, first, some_begin, some_end);
      else
        add_partials<8, 1>(s, first, some_begin, some_end);
      sync_consumers();
    }
    if (waits) counter.depart();
  }

  // Return partial result j of an item.
  __device__ __forceinline__ const float* partial(const Segment& s, int j) const {
    const int number = s.first_partial + (p_.fixed_split || j == 0 ? j : 2 * j - 1);
    return attention::partial_of(p_, plan_, number, row_tile_, kLatent);
  }

  // Put the factors of partial results of rows [first, last) into factor_of(), and write lse of those whose first unit
  // is at least `begin`. One warp per row.
  __device__ __forceinline__ void find_factors(const Segment& s, int first, int last, int begin) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (int row = first + static_cast<int>(threadIdx.x) / kWarp; row < last; row += kConsumerThreads / kWarp) {
      float2* const factors = merge_factors() + (row - first) * s.splits;
      float row_max = -INFINITY;
#pragma unroll 1
      for (int j = lane; j < s.splits; j += kWarp) {
        const float* from = partial(s, j) + kRows * kLatent + row;
        const float2 x = make_float2(__ldcg(from), __ldcg(from + kRows));
        factors[j] = x;
        row_max = fmaxf(row_max, x.x);
      }
#pragma unroll
      for (int step = kWarp / 2; step > 0; step /= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, step));
      const float origin = row_max == -INFINITY ? 0 : row_max;
      float sum = 0;
#pragma unroll 1
      for (int j = lane; j < s.splits; j += kWarp) {
        factors[j].x = attention::exp2_fast(factors[j].x - origin);
        sum += factors[j].x * factors[j].y;
      }
      __syncwarp();
      if (p_.fixed_split) {
        sum = 0;
#pragma unroll 1
        for (int j = 0; j < s.splits; ++j) sum += factors[j].x * factors[j].y;
        __syncwarp();
      } else {
#pragma unroll
        for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
      }
      const float factor = sum == 0 ? 0 : p_.v_scale / sum;
#pragma unroll 1
      for (int j = lane; j < s.splits; j += kWarp) factors[j].x *= factor;
      if (lane == 0 && row * kChunks >= begin)
        attention::store_lse(p_, s.request, attention::query_row(plan_, s.kv_head, first_row(s) + row), row_max, sum);
    }
  }
  // (factor, sum of weights) per row and partial result, where q was.
  __device__ __forceinline__ float2* merge_factors() const { return reinterpret_cast<float2*>(shared_.q); }

  // Write units [begin, end), the factors of whose rows begin with row `first_factors`. If they are few, several warps
  // share one and add their sums in order.
  template <int kParts, int kUnits>
  __device__ __forceinline__ void add_partials(const Segment& s, int first_factors, int begin, int end) {
    constexpr int kWarps = kConsumerThreads / kWarp;
    const int lane = threadIdx.x % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp, count = end - begin;
    const int sharing = p_.fixed_split || count > kWarps / 2 ? 1 : count > 2 ? 2 : count > 1 ? 4 : kWarps;
    const int step = kWarps / sharing, member = warp % sharing;
#pragma unroll 1
    for (int unit = begin + warp / sharing; unit - warp / sharing < end; unit += kUnits * step) {
      float4 sums[kUnits]{};
#pragma unroll 1
      for (int j = member; j < s.splits; j += kParts * sharing) {
        float4 x[kParts][kUnits];
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
          const float* from = partial(s, j + k * sharing) + 4 * lane;
#pragma unroll
          for (int i = 0; i < kUnits; ++i)
            if (j + k * sharing < s.splits && unit + i * step < end)
              x[k][i] = __ldcg(reinterpret_cast<const float4*>(from + (unit + i * step) * kChunk));
        }
#pragma unroll
        for (int k = 0; k < kParts; ++k)
#pragma unroll
          for (int i = 0; i < kUnits; ++i)
            if (j + k * sharing < s.splits && unit + i * step < end) {
              const int row = (unit + i * step) / kChunks - first_factors;
              const float factor = merge_factors()[row * s.splits + j + k * sharing].x;
              sums[i].x += factor * x[k][i].x, sums[i].y += factor * x[k][i].y;
              sums[i].z += factor * x[k][i].z, sums[i].w += factor * x[k][i].w;
            }
      }
      if (sharing > 1) {  // then each warp has at most one unit
        float4* const all = reinterpret_cast<float4*>(shared_.weights);
        all[threadIdx.x] = sums[0];
        sync_consumers();
        if (member == 0)
#pragma unroll 1
          for (int other = 1; other < sharing; ++other) {
            const float4 x = all[threadIdx.x + other * kWarp];
            sums[0].x += x.x, sums[0].y += x.y, sums[0].z += x.z, sums[0].w += x.w;
          }
      }
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int mine = unit + i * step;
        if (mine >= end || member != 0) continue;
        const QueryRow at = attention::query_row(plan_, s.kv_head, first_row(s) + mine / kChunks);
        attention::store_out<T>(p_, s.request, at, mine % kChunks * kChunk + 4 * lane, sums[i]);
      }
    }
  }

  Shared& shared_;
  const MlaTreeAttentionParams& p_;
  const DevicePlan& plan_;
  const int row_tile_;
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp % 4;
  Turn<Ring::kSegments> segment_;  // of the next segment
  Turn<Ring::kStages> stage_;
  Turn<1> q_, weights_;
  bool q_load_started_ = false;  // whether q of the next segment is already being loaded
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, 1)
    wgmma_kernel(const __grid_constant__ MlaTreeAttentionParams any_p, const __grid_constant__ DevicePlan any_plan,
                 const __grid_constant__ LatentMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const std::conditional_t<Attention::kIsSlim, SlimParams, const MlaTreeAttentionParams&> p(any_p);
  const std::conditional_t<Attention::kIsSlim, SlimPlan, const DevicePlan&> plan(any_plan);
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) {
    shared.init();
    Cluster::fence_barrier_init();
  }
  __syncthreads();
  const int worker = blockIdx.x / plan.row_tiles, row_tile = blockIdx.x % plan.row_tiles;
  const int warp = threadIdx.x / kWarp;
  if (warp < Attention::Ring::kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<Attention::kConsumerRegisters>();
    Attention attention(shared, p, plan, row_tile);
    if (__shfl_sync(kFullMask, warp, 0) < Attention::Ring::kConsumers / 2)
      attention.template consume<true>();
    else
      attention.template consume<false>();
    attention.merge_items();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Attention::kProducerRegisters>();
    Attention::write_rows_without_kv(p, plan);
    shared.ring.produce(shared.control, p, plan, worker, maps);
  }
#endif
}

// Launch plan.workers x plan.row_tiles blocks. Blocks wait for each other's partial results, so all of them must be
// co-resident, which only a cooperative launch guarantees.
template <class Attention>
void launch_form(const MlaTreeAttentionParams& p, Stream stream) {
  const DevicePlan plan = attention::make_device_plan({.tile_rows = p.plan.tile_rows,
                                                       .tile_tokens = p.plan.tile_tokens,
                                                       .row_tiles = p.plan.row_tiles,
                                                       .blocks_per_sm = 1,
                                                       .whole_items = p.plan.whole_items,
                                                       .workers = p.plan.workers},
                                                      p);
  constexpr size_t kSharedBytes = sizeof(typename Attention::Shared);
  SD_CUDA_CHECK("mla_tree_attention",
                cudaFuncSetAttribute(wgmma_kernel<Attention>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(kSharedBytes)));
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{.gridDim = dim3(static_cast<unsigned>(plan.workers * plan.row_tiles)),
                                  .blockDim = dim3(Attention::kThreads),
                                  .dynamicSmemBytes = kSharedBytes,
                                  .stream = stream,
                                  .attrs = attributes,
                                  .numAttrs = 2};
  SD_CUDA_CHECK("mla_tree_attention",
                cudaLaunchKernelEx(&config, wgmma_kernel<Attention>, p, plan,
                                   Attention::Ring::kDequantize ? LatentMaps{} : encode_latent_maps(p)));
}

// Launch the form that the call can have. Instantiated by instantiations/.
template <class T, class Row>
void launch_wgmma(const MlaTreeAttentionParams& p, Stream stream) {
  // Rows of 656 bytes take up to a tenth longer in the slim form where KV is long or many requests run.
  const bool is_faster_slim = !std::is_same_v<Row, Row656> || p.batch < 16;
  if (is_faster_slim && can_be_slim(p)) return launch_form<WgmmaAttention<T, Row, true>>(p, stream);
  launch_form<WgmmaAttention<T, Row, false>>(p, stream);
}

}  // namespace specdec::mla
