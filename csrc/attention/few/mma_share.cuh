// How four warps sum up to 16 rows over a block's share with mma.sync: each has a quarter of every tile's tokens, and
// all threads of the block put together what they have.
#pragma once

#include "attention/few/parts.cuh"
#include "attention/few/share.cuh"
#include "attention/mma_attention.cuh"

namespace specdec::few {

// Query rows of T, pools of Kv.
template <class T, class Kv, int D, class Stream>
class MmaShare {
 public:
  static constexpr int kRows = 16, kWarps = Stream::kConsumers;
  static constexpr bool kPartsInStages = false;
  using QueryTile = Stage<kRows, 2 * D>;  // of which k is used
  struct Queries {
    alignas(1024) unsigned char q[kRows * 2 * D];
  };
  struct Shared {
    float max[kWarps][kRows], sum[kWarps][kRows];
  };

  __device__ MmaShare(Queries& queries, typename Stream::Shared& stream, Shared& shared, const TreeAttentionParams& p,
                      const Cut& cut, const Segment& s)
      : queries_(queries), stream_(stream), shared_(shared), p_(p), cut_(cut), s_(s) {}

  // Begins to load the rows of q; zeros for those behind the request.
  __device__ void ask_for_q() const {
    if constexpr (kFp8) return;
    constexpr int kPieces = D / 8;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(queries_.q));
#pragma unroll
    for (int n = threadIdx.x; n < kRows * kPieces; n += kWarps * kWarp) {
      const int row = n / kPieces, piece = n % kPieces;
      const T* from = q_row<T>(p_, cut_, s_, s_.first_row + row);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + QueryTile::offset(row, piece)),
                   "l"(from ? from + piece * 8 : static_cast<const T*>(p_.q)), "r"(from ? 16 : 0)
                   : "memory");
    }
  }

  // When they are there.
  __device__ void take_q() {
    if constexpr (kFp8) {
      scale_ = Mma::load_q(p_, cut_, s_, s_.first_row, operands_);
      return;
    }
    scale_ = {p_.log2_scale, p_.log2_scale};
    asm volatile("cp.async.wait_all;" ::: "memory");
    sync();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const int lane = threadIdx.x % kWarp;
      cute::SM75_U32x4_LDSM_N::copy(
          *reinterpret_cast<const cute::uint128_t*>(queries_.q + QueryTile::offset(lane % 16, 2 * k + lane / 16)),
          operands_.q[k][0], operands_.q[k][1], operands_.q[k][2], operands_.q[k][3]);
    }
    sync();
  }

  // By the consumers.
  __device__ void sum(Span share) {
    WarpRows<D> rows;
    rows.clear();
    for (int first = share.begin; first < share.end; first += Stream::kTokens) {
      stream_.full[stage_.at].wait(stage_.parity);
      Mma::add_tile(p_, cut_, s_, s_.first_row, operands_, scale_, stream_, stage_.at, first, rows);
      if (threadIdx.x % kWarp == 0) stream_.empty[stage_.at].arrive();
      stage_.advance();
    }
    rows.finish();
    sync();  // all stages are free, until the rows have been put together
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0) {
        shared_.max[warp][lane / 4 + 8 * h] = rows.max[h];
        shared_.sum[warp][lane / 4 + 8 * h] = rows.sum[h];
      }
#pragma unroll
      for (int n = 0; n < D / 16; ++n)
        Mma::Operands::spread(rows.out, n, h, [&](int column, float2 x) {
          *reinterpret_cast<float2*>(place(warp, lane / 4 + 8 * h, column)) = x;
        });
    }
  }

  // By all threads of the block, behind a barrier of them: to the blocks that finish the rows.
  template <int kThreads>
  __device__ void put(Parts<D, kRows>& parts, const Mbarrier& there) const {
    const int count = s_.request.valid_rows * cut_.group.divisor - s_.first_row;
#pragma unroll
    for (int begin = 0; begin < kRows * D / 4; begin += kThreads) {
      const int n = begin + static_cast<int>(threadIdx.x), row = n / (D / 4), column = n % (D / 4) * 4;
      if (row >= count) continue;
      float top = shared_.max[0][row];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) top = fmaxf(top, shared_.max[w][row]);
      const float origin = top == -INFINITY ? 0 : top;
      float4 x{};
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = exp2_fast(shared_.max[w][row] - origin);
        const float4 y = *reinterpret_cast<const float4*>(place(w, row, column));
        x.x += weight * y.x, x.y += weight * y.y, x.z += weight * y.z, x.w += weight * y.w;
        total += weight * shared_.sum[w][row];
      }
      const auto to = Parts<D, kRows>::place_of(row);
      parts.put(to, column, x, there);
      if (column == 0) parts.put(to, top, total, there);
    }
  }

 private:
  static constexpr bool kFp8 = std::is_same_v<Kv, Float8>;
  using Mma = MmaAttention<T, Kv, D, kRows, Stream::kStages>;
  static_assert(Mma::kShares == kWarps && kWarps * kRows * D * sizeof(float) <= sizeof(typename Stream::Stage));

  __device__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kWarps * kWarp) : "memory"); }

  // Of a warp's sums, in a stage. Rows are swizzled by 32 bytes: 8 lanes that write one column of 8 rows meet 8
  // different banks.
  __device__ float* place(int warp, int row, int column) const {
    return reinterpret_cast<float*>(&stream_.stages[0]) + (warp * kRows + row) * D + ((column / 8 ^ row) % 8 * 8) +
           column % 8 + column / 64 * 64;
  }

  Queries& queries_;
  typename Stream::Shared& stream_;
  Shared& shared_;
  const TreeAttentionParams& p_;
  const Cut& cut_;
  const Segment& s_;
  typename Mma::Operands operands_;
  Scale scale_;
  Turn<Stream::kStages> stage_;
};

}  // namespace specdec::few
