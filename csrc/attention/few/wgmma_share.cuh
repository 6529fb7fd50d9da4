// How one or two warpgroups sum 64 rows each over a block's share with wgmma: a tile's V is multiplied while the scores
// of the next one become weights.
#pragma once

#include "attention/few/parts.cuh"
#include "attention/few/share.cuh"
#include "core/wgmma.cuh"

namespace specdec::few {

// Query rows of T, pools of Kv.
template <class T, class Kv, int D, class Stream>
class WgmmaShare {
  using Factor = std::conditional_t<std::is_same_v<Kv, Float8>, Half, T>;  // what is multiplied
  static constexpr bool kMakesHalf = !std::is_same_v<T, Factor>;

 public:
  static constexpr int kRows = 16 * Stream::kConsumers;
  static_assert(kRows % 64 == 0 && Stream::kTokens == 64);
  using QueryTile = Stage<kRows, 2 * D>;        // of which k is used
  static constexpr bool kPartsInStages = true;  // there is no room for them besides
  struct Queries {
    alignas(1024) unsigned char q[kRows * 2 * D];
  };
  struct Shared {};

  __device__ WgmmaShare(Queries& queries, typename Stream::Shared& stream, Shared&, const TreeAttentionParams& p,
                        const Cut& cut, const Segment& s)
      : queries_(queries), stream_(stream), p_(p), cut_(cut), s_(s) {}

  // Begins to load the rows of q; zeros for those behind the request.
  __device__ void ask_for_q() const {
    constexpr int kPieces = D / 8;
    const int end = s_.request.valid_rows * cut_.group.divisor;
    const T* q = static_cast<const T*>(p_.q) + s_.request.q_start;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(queries_.q));
#pragma unroll 4
    for (int n = threadIdx.x; n < kRows * kPieces; n += kRows / 16 * kWarp) {
      const int row = n / kPieces, piece = n % kPieces;
      const QueryRow at = query_row(cut_, s_.head, s_.first_row + row);
      const bool valid = s_.first_row + row < end;
      const T* from = valid ? q + at.row * p_.q_strides.row + at.head * p_.q_strides.head + piece * 8 : q;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + QueryTile::offset(row, piece)), "l"(from),
                   "r"(valid ? 16 : 0)
                   : "memory");
    }
  }

  // When they are there.
  __device__ void take_q() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if constexpr (kMakesHalf) {
      sync();
      scale_ = make_half<D, QueryTile>(queries_.q, 16 * warp_, p_.log2_scale);
    }
    show_to_wgmma();
    sync();
  }

  // By the consumers.
  __device__ void sum(Span share) {
    rows_.clear();
    if (share.begin < share.end) sum_tiles(share, rows_);
    rows_.finish();
    sync();  // nobody multiplies by these rows of q any more
  }

  // By the consumers: to the blocks that finish the rows.
  __device__ void put(Parts<D, kRows>& parts, const Mbarrier& there) const {
    const WarpRows<D>& rows = rows_;
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_ * 16 + lane / 4 + 8 * h;
      const bool valid = s_.first_row + row < s_.request.valid_rows * cut_.group.divisor;
      const auto to = Parts<D, kRows>::place_of(row);
#pragma unroll
      for (int d = 0; d < D / 8; d += 2) {
        float a[2] = {rows.out[d][2 * h], rows.out[d][2 * h + 1]};
        float b[2] = {rows.out[d + 1][2 * h], rows.out[d + 1][2 * h + 1]};
        // Of two lanes the even one gets the four columns of d, the odd one those of d + 1.
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float other = __shfl_xor_sync(kFullMask, lane & 1 ? a[e] : b[e], 1);
          (lane & 1 ? a[e] : b[e]) = other;
        }
        if (valid) parts.put(to, 8 * d + lane % 2 * 8 + lane % 4 / 2 * 4, make_float4(a[0], a[1], b[0], b[1]), there);
      }
      if (valid && lane % 4 == 0) parts.put(to, rows.max[h], rows.sum[h], there);
    }
  }

 private:
  using Tile = typename Stream::Stage;
  using Place = typename Stream::Shared::Place;
  using MultiplyK = Wgmma<Factor, Stream::kTokens, cute::SM90::GMMA::Major::K>;
  using MultiplyV = Wgmma<Factor, D, cute::SM90::GMMA::Major::MN>;
  using Scores = float[Stream::kTokens / 8][4];
  using Weights = uint32_t[Stream::kTokens / 16][4];

  // Which tokens of a tile two rows see.
  struct Seen {
    bool all;
    uint64_t bits[2];
  };

  __device__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kRows / 16 * kWarp) : "memory"); }

  __device__ void sum_tiles(Span share, WarpRows<D>& rows) {
    Scores scores;
    Weights weights;
    int first = share.begin;
    Seen seen = wait_for_tile(first);
    cute::warpgroup_arrive();
    multiply_k(scores);
    cute::warpgroup_wait<0>();
    pin(scores);
    leave_k();
    rows.follow(weigh(seen, scores, rows));
    pack_weights<Factor>(scores, weights);

    while ((first += Stream::kTokens) < share.end) {
      const Place before = place_;
      place_.advance();
      wait_for_v(before);
      seen = wait_for_tile(first);
      pin(rows.out);
      cute::warpgroup_arrive();
      multiply_k(scores);
      add_v(before, weights, rows);
      cute::warpgroup_wait<1>();
      pin(scores);
      leave_k();
      const auto fall = weigh(seen, scores, rows);
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
    cute::warpgroup_wait<0>();
    pin(rows.out);
    leave_v(place_);
    place_.advance();
  }

  // K and V of a tile, which come and go together unless they have been widened.
  static constexpr bool kApart = Stream::Shared::kApart;
  __device__ void wait_for_v(Place place) const {
    if constexpr (kApart) {
      const auto at = place.value();
      stream_.full_v[at.at].wait(at.parity);
    }
  }
  __device__ void leave_k() const {
    if constexpr (kApart) {
      __syncwarp();
      if (threadIdx.x % kWarp == 0) stream_.empty[place_.key().at].arrive();
    }
  }
  __device__ void leave_v(Place place) const {
    if (threadIdx.x % kWarp != 0) return;
    if constexpr (kApart)
      stream_.empty_v[place.value().at].arrive();
    else
      stream_.empty[place.value().at].arrive();
  }

  // Of rows lane / 4 and lane / 4 + 8 of the warp.
  __device__ Seen wait_for_tile(int first) const {
    const auto at = place_.key();
    stream_.full[at.at].wait(at.parity);
    if constexpr (!kApart) show_to_wgmma();  // else who has widened it has done so
    const uint64_t there = stream_.rows_there(at.at, 0);
    Seen seen;
    seen.all = first <= s_.request.prefix - Stream::kTokens && first >= s_.request.end - p_.window && !~there;
    if (seen.all) return seen;
    if (all_see(p_, s_.request, first, there)) {
      seen.bits[0] = seen.bits[1] = there;
      return seen;
    }
    // Each of 16 lanes looks for one of the warp's rows.
    const int lane = threadIdx.x % kWarp, last = s_.request.valid_rows * cut_.group.divisor - 1;
    const int i = cut_.group.div(min(s_.first_row + warp_ * 16 + lane % 16, last));
    const uint64_t mine = visible_word(p_, s_.request, i, first) & there;
#pragma unroll
    for (int h = 0; h < 2; ++h) seen.bits[h] = __shfl_sync(kFullMask, mine, 8 * h + lane / 4);
    return seen;
  }

  // scores = q k^T.
  __device__ void multiply_k(Scores& scores) const {
    const WarpOperand q(wgmma_operand(queries_.q + (kRows == 64 ? 0 : warp_ / 4 * 64 * QueryTile::kLine), 0));
    const WarpOperand k(wgmma_operand(stream_.keys(place_.key().at), 0));
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      const int panel = d / 64, inside = d % 64 * 2;
      MultiplyK::multiply(q.behind(panel * QueryTile::kPanel + inside), k.behind(panel * Tile::kPanel + inside), d > 0,
                          scores);
    }
    cute::warpgroup_commit_batch();
  }

  // rows.out += weights v.
  __device__ void add_v(Place place, const Weights& weights, WarpRows<D>& rows) const {
    const WarpOperand v(wgmma_operand(stream_.values(place.value().at), Tile::kPanel));
#pragma unroll
    for (int n = 0; n < Stream::kTokens / 16; ++n)
      MultiplyV::multiply(weights[n], v.behind(n * 16 * 128), true, rows.out);
    cute::warpgroup_commit_batch();
  }

  __device__ auto weigh(const Seen& seen, Scores& scores, WarpRows<D>& rows) const {
    const Scale scale = rows.cap(p_, kMakesHalf ? scale_ : Scale{p_.log2_scale, p_.log2_scale}, scores);
    if (!seen.all) rows.hide(seen.bits, scores);
    return rows.weigh(scale, scores);
  }

  Queries& queries_;
  typename Stream::Shared& stream_;
  const TreeAttentionParams& p_;
  const Cut& cut_;
  const Segment& s_;
  WarpRows<D> rows_;
  Scale scale_;  // of scores, where rows of q had to be made Half
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp;
  Place place_;
};

}  // namespace specdec::few
