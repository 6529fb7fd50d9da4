// Consumers of cluster attention with wgmma: one or two warpgroups accumulate 64 rows each over the block's share of
// the KV. The PV product of a tile overlaps with the softmax of the next tile.
#pragma once

#include "attention/sm90/cluster_merge.cuh"
#include "attention/sm90/cluster_ring.cuh"
#include "core/wgmma.cuh"

namespace specdec::attention {

// T: type of query rows. Kv: type of the pools.
template <class T, class Kv, int D, class Ring>
class ClusterWgmma {
  using MmaElement = std::conditional_t<std::is_same_v<Kv, Float8>, Half, T>;  // input type of the MMA
  static constexpr bool kConvertsQ = !std::is_same_v<T, MmaElement>;

 public:
  static constexpr int kRows = 16 * Ring::kConsumers;
  static_assert(kRows % 64 == 0 && Ring::kTokens == 64);
  using QueryTile = Stage<kRows, 2 * D>;           // its k holds q
  static constexpr bool kPartialsInStages = true;  // there is no other room for them
  struct Queries {
    alignas(1024) unsigned char q[kRows * 2 * D];
  };
  struct Shared {};

  __device__ ClusterWgmma(Queries& queries, typename Ring::Shared& ring, Shared&, const TreeAttentionParams& p,
                          const DevicePlan& plan, const Segment& s)
      : queries_(queries), ring_(ring), p_(p), plan_(plan), s_(s) {}

  // Start loading the rows of q, with zeros past the request.
  __device__ void begin_load_q() const {
    constexpr int kPieces = D / 8;
    const int end = s_.request.valid_rows * plan_.gqa_group.divisor;
    const T* q = static_cast<const T*>(p_.q) + s_.request.q_start;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(queries_.q));
#pragma unroll 4
    for (int n = threadIdx.x; n < kRows * kPieces; n += kRows / 16 * kWarp) {
      const int row = n / kPieces, piece = n % kPieces;
      const QueryRow at = query_row(plan_, s_.kv_head, s_.first_row + row);
      const bool valid = s_.first_row + row < end;
      const T* from = valid ? q + at.row * p_.q_strides.row + at.head * p_.q_strides.head + piece * 8 : q;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + QueryTile::offset(row, piece)), "l"(from),
                   "r"(valid ? 16 : 0)
                   : "memory");
    }
  }

  // Wait for the rows of q, and convert them to Half if needed.
  __device__ void finish_load_q() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if constexpr (kConvertsQ) {
      sync();
      scale_ = scale_to_half<D, QueryTile>(queries_.q, 16 * warp_, p_.log2_scale);
    }
    fence_for_wgmma();
    sync();
  }

  // Accumulate a share of the KV. Call from the consumers.
  __device__ void accumulate(Span share) {
    rows_.clear();
    if (share.begin < share.end) sum_tiles(share, rows_);
    rows_.finish();
    sync();  // no warp reads these rows of q any more
  }

  // Send the partial results to the blocks that finish the rows. Call from the consumers.
  __device__ void send(ClusterPartials<D, kRows>& partials, const Mbarrier& arrived) const {
    const OnlineSoftmax<D>& rows = rows_;
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_ * 16 + lane / 4 + 8 * h;
      const bool valid = s_.first_row + row < s_.request.valid_rows * plan_.gqa_group.divisor;
      const auto to = ClusterPartials<D, kRows>::destination_of(row);
#pragma unroll
      for (int d = 0; d < D / 8; d += 2) {
        float a[2] = {rows.out[d][2 * h], rows.out[d][2 * h + 1]};
        float b[2] = {rows.out[d + 1][2 * h], rows.out[d + 1][2 * h + 1]};
        // Swap with the adjacent lane: the even lane gets the four columns of d, the odd lane those of d + 1.
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float other = __shfl_xor_sync(kFullMask, lane & 1 ? a[e] : b[e], 1);
          (lane & 1 ? a[e] : b[e]) = other;
        }
        if (valid)
          partials.send(to, 8 * d + lane % 2 * 8 + lane % 4 / 2 * 4, make_float4(a[0], a[1], b[0], b[1]), arrived);
      }
      if (valid && lane % 4 == 0) partials.send(to, rows.max[h], rows.sum[h], arrived);
    }
  }

 private:
  using Tile = typename Ring::Stage;
  using Cursor = typename Ring::Shared::Cursor;
  using QkMma = Wgmma<MmaElement, Ring::kTokens, cute::SM90::GMMA::Major::K>;
  using PvMma = Wgmma<MmaElement, D, cute::SM90::GMMA::Major::MN>;
  using Scores = float[Ring::kTokens / 8][4];
  using Weights = uint32_t[Ring::kTokens / 16][4];

  // The tokens of a tile that two rows attend to.
  struct TileMask {
    bool all;
    uint64_t bits[2];
  };

  __device__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kRows / 16 * kWarp) : "memory"); }

  __device__ void sum_tiles(Span share, OnlineSoftmax<D>& rows) {
    Scores scores;
    Weights weights;
    int first = share.begin;
    TileMask visible = wait_for_tile(first);
    cute::warpgroup_arrive();
    multiply_qk(scores);
    cute::warpgroup_wait<0>();
    pin(scores);
    release_k();
    rows.rescale(softmax(visible, scores, rows));
    pack_weights<MmaElement>(scores, weights);

    while ((first += Ring::kTokens) < share.end) {
      const Cursor before = cursor_;
      cursor_.advance();
      wait_for_v(before);
      visible = wait_for_tile(first);
      pin(rows.out);
      cute::warpgroup_arrive();
      multiply_qk(scores);
      accumulate_pv(before, weights, rows);
      cute::warpgroup_wait<1>();
      pin(scores);
      release_k();
      const auto rescale_by = softmax(visible, scores, rows);
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
    cute::warpgroup_wait<0>();
    pin(rows.out);
    release_v(cursor_);
    cursor_.advance();
  }

  // K and V of a tile share a barrier unless they have been dequantized.
  static constexpr bool kSeparateKv = Ring::Shared::kSeparateKv;
  __device__ void wait_for_v(Cursor cursor) const {
    if constexpr (kSeparateKv) {
      const auto at = cursor.value();
      ring_.full_v[at.at].wait(at.parity);
    }
  }
  __device__ void release_k() const {
    if constexpr (kSeparateKv) {
      __syncwarp();
      if (threadIdx.x % kWarp == 0) ring_.empty[cursor_.key().at].arrive();
    }
  }
  __device__ void release_v(Cursor cursor) const {
    if (threadIdx.x % kWarp != 0) return;
    if constexpr (kSeparateKv)
      ring_.empty_v[cursor.value().at].arrive();
    else
      ring_.empty[cursor.value().at].arrive();
  }

  // Wait for a tile, and return what rows lane / 4 and lane / 4 + 8 of the warp attend to.
  __device__ TileMask wait_for_tile(int first) const {
    const auto at = cursor_.key();
    ring_.full[at.at].wait(at.parity);
    if constexpr (!kSeparateKv) fence_for_wgmma();  // dequantizer warps have already issued the proxy fence
    const uint64_t present = ring_.present_tokens(at.at, 0);
    TileMask visible;
    visible.all = first <= s_.request.prefix - Ring::kTokens && first >= s_.request.end - p_.window && !~present;
    if (visible.all) return visible;
    if (all_visible(p_, s_.request, first, present)) {
      visible.bits[0] = visible.bits[1] = present;
      return visible;
    }
    // Each of 16 lanes computes the mask of one of the warp's rows.
    const int lane = threadIdx.x % kWarp, last = s_.request.valid_rows * plan_.gqa_group.divisor - 1;
    const int i = plan_.gqa_group.div(min(s_.first_row + warp_ * 16 + lane % 16, last));
    const uint64_t mine = visible_word(p_, s_.request, i, first) & present;
#pragma unroll
    for (int h = 0; h < 2; ++h) visible.bits[h] = __shfl_sync(kFullMask, mine, 8 * h + lane / 4);
    return visible;
  }

  // Issue scores = q k^T.
  __device__ void multiply_qk(Scores& scores) const {
    const WarpOperand q(wgmma_operand(queries_.q + (kRows == 64 ? 0 : warp_ / 4 * 64 * QueryTile::kLine), 0));
    const WarpOperand k(wgmma_operand(ring_.keys(cursor_.key().at), 0));
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      const int panel = d / 64, panel_offset = d % 64 * 2;
      QkMma::multiply(q.offset(panel * QueryTile::kPanel + panel_offset), k.offset(panel * Tile::kPanel + panel_offset),
                      d > 0, scores);
    }
    cute::warpgroup_commit_batch();
  }

  // Issue rows.out += weights v.
  __device__ void accumulate_pv(Cursor cursor, const Weights& weights, OnlineSoftmax<D>& rows) const {
    const WarpOperand v(wgmma_operand(ring_.values(cursor.value().at), Tile::kPanel));
#pragma unroll
    for (int n = 0; n < Ring::kTokens / 16; ++n) PvMma::multiply(weights[n], v.offset(n * 16 * 128), true, rows.out);
    cute::warpgroup_commit_batch();
  }

  __device__ auto softmax(const TileMask& visible, Scores& scores, OnlineSoftmax<D>& rows) const {
    const Scale scale = rows.cap(p_, kConvertsQ ? scale_ : Scale{p_.log2_scale, p_.log2_scale}, scores);
    if (!visible.all) rows.mask(visible.bits, scores);
    return rows.softmax(scale, scores);
  }

  Queries& queries_;
  typename Ring::Shared& ring_;
  const TreeAttentionParams& p_;
  const DevicePlan& plan_;
  const Segment& s_;
  OnlineSoftmax<D> rows_;
  Scale scale_;  // of scores, if rows of q were converted to Half
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp;
  Cursor cursor_;
};

}  // namespace specdec::attention
