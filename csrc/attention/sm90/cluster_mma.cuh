// Consumers of cluster attention with mma.sync, for up to 16 rows: each of four warps has a quarter of every tile's
// tokens in the block's share of the KV; all threads of the block then reduce over the warps.
#pragma once

#include "attention/sm80/mma.cuh"
#include "attention/sm90/cluster_merge.cuh"
#include "attention/sm90/cluster_ring.cuh"

namespace specdec::attention {

// T: type of query rows. Kv: type of the pools.
template <class T, class Kv, int D, class Ring>
class ClusterMma {
 public:
  static constexpr int kRows = 16, kWarps = Ring::kConsumers;
  static constexpr bool kPartialsInStages = false;
  using QueryTile = Stage<kRows, 2 * D>;  // its k holds q
  struct Queries {
    alignas(1024) unsigned char q[kRows * 2 * D];
  };
  struct Shared {
    float max[kWarps][kRows], sum[kWarps][kRows];
  };

  __device__ ClusterMma(Queries& queries, typename Ring::Shared& ring, Shared& shared, const TreeAttentionParams& p,
                        const DevicePlan& plan, const Segment& s)
      : queries_(queries), ring_(ring), shared_(shared), p_(p), plan_(plan), s_(s) {}

  // Start loading the rows of q, with zeros past the request.
  __device__ void begin_load_q() const {
    if constexpr (kFp8) return;
    constexpr int kPieces = D / 8;
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(queries_.q));
#pragma unroll
    for (int n = threadIdx.x; n < kRows * kPieces; n += kWarps * kWarp) {
      const int row = n / kPieces, piece = n % kPieces;
      const T* from = q_row<T>(p_, plan_, s_, s_.first_row + row);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + QueryTile::offset(row, piece)),
                   "l"(from ? from + piece * 8 : static_cast<const T*>(p_.q)), "r"(from ? 16 : 0)
                   : "memory");
    }
  }

  // Wait for the rows of q and load them into registers.
  __device__ void finish_load_q() {
    if constexpr (kFp8) {
      scale_ = Mma::load_q(p_, plan_, s_, s_.first_row, operands_);
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

  // Accumulate a share of the KV. Call from the consumers.
  __device__ void accumulate(Span share) {
    OnlineSoftmax<D> rows;
    rows.clear();
    for (int first = share.begin; first < share.end; first += Ring::kTokens) {
      ring_.full[stage_.at].wait(stage_.parity);
      Mma::add_tile(p_, plan_, s_, s_.first_row, operands_, scale_, ring_, stage_.at, first, rows);
      if (threadIdx.x % kWarp == 0) ring_.empty[stage_.at].arrive();
      stage_.advance();
    }
    rows.finish();
    sync();  // all stages stay free until the rows have been reduced
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0) {
        shared_.max[warp][lane / 4 + 8 * h] = rows.max[h];
        shared_.sum[warp][lane / 4 + 8 * h] = rows.sum[h];
      }
#pragma unroll
      for (int n = 0; n < D / 16; ++n)
        Mma::Operands::visit_columns(rows.out, n, h, [&](int column, float2 x) {
          *reinterpret_cast<float2*>(address_of(warp, lane / 4 + 8 * h, column)) = x;
        });
    }
  }

  // Send the partial results to the blocks that finish the rows. Call from all threads of the block, after a block
  // barrier.
  template <int kThreads>
  __device__ void send(ClusterPartials<D, kRows>& partials, const Mbarrier& arrived) const {
    const int count = s_.request.valid_rows * plan_.gqa_group.divisor - s_.first_row;
#pragma unroll
    for (int begin = 0; begin < kRows * D / 4; begin += kThreads) {
      const int n = begin + static_cast<int>(threadIdx.x), row = n / (D / 4), column = n % (D / 4) * 4;
      if (row >= count) continue;
      float row_max = shared_.max[0][row];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) row_max = fmaxf(row_max, shared_.max[w][row]);
      const float origin = row_max == -INFINITY ? 0 : row_max;
      float4 x{};
      float row_sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = exp2_fast(shared_.max[w][row] - origin);
        const float4 y = *reinterpret_cast<const float4*>(address_of(w, row, column));
        x.x += weight * y.x, x.y += weight * y.y, x.z += weight * y.z, x.w += weight * y.w;
        row_sum += weight * shared_.sum[w][row];
      }
      const auto to = ClusterPartials<D, kRows>::destination_of(row);
      partials.send(to, column, x, arrived);
      if (column == 0) partials.send(to, row_max, row_sum, arrived);
    }
  }

 private:
  static constexpr bool kFp8 = std::is_same_v<Kv, Float8>;
  using Mma = MmaAttention<T, Kv, D, kRows, Ring::kStages>;
  static_assert(Mma::kWarpsPerRows == kWarps && kWarps * kRows * D * sizeof(float) <= sizeof(typename Ring::Stage));

  __device__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kWarps * kWarp) : "memory"); }

  // Return where a warp's partial results lie in the first stage. Rows are swizzled by 32 bytes, so that 8 lanes that
  // write one column of 8 rows hit 8 different banks.
  __device__ float* address_of(int warp, int row, int column) const {
    return reinterpret_cast<float*>(&ring_.stages[0]) + (warp * kRows + row) * D + ((column / 8 ^ row) % 8 * 8) +
           column % 8 + column / 64 * 64;
  }

  Queries& queries_;
  typename Ring::Shared& ring_;
  Shared& shared_;
  const TreeAttentionParams& p_;
  const DevicePlan& plan_;
  const Segment& s_;
  typename Mma::Operands operands_;
  Scale scale_;
  Turn<Ring::kStages> stage_;
};

}  // namespace specdec::attention
