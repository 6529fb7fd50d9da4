// Query rows as the N dimension (columns) of wgmma products whose A operand is K or V: how consumers load the rows, and
// how they reduce over warps and write the results.
#pragma once

#include <cfloat>

#include "attention/common/kv_ring.cuh"
#include "attention/common/merge.cuh"
#include "attention/common/mma_operands.cuh"
#include "core/wgmma.cuh"

namespace specdec::attention {

template <class T, int D, int kRows, class Ring>
class TransposedRows {
 public:
  static constexpr int kConsumers = Ring::kConsumers, kWarpgroups = kConsumers / 4, kWarpgroupThreads = 128;
  using QueryTile = Stage<kRows, 2 * D>;  // its k holds q
  using WeightTile = Stage<Ring::kTokens, 2 * kRows>;

  // Softmax state of a row, without its sums.
  struct RowState {
    float max, scale;  // running maximum in log2 units; factor from (capped) scores to log2 units
  };
  struct Shared {
    Ring ring;
    alignas(1024) unsigned char q[kRows * 2 * D];
    alignas(1024) unsigned char weights[kWarpgroups][Ring::kTokens * 2 * kRows];
    alignas(16) RowState state[kWarpgroups][kRows];
    alignas(16) uint64_t visible[kWarpgroups][kRows];  // bit j: the row attends to token j of the tile
    alignas(16) float factor[kWarpgroups][kRows];
    alignas(16) float cap_scale[kRows];  // factors of scores before they are capped
    float warp_partials[kConsumers][kRows];
  };

  __device__ TransposedRows(Shared& shared, const TreeAttentionParams& p, const DevicePlan& plan, int row_tile)
      : shared_(shared), p_(p), plan_(plan), row_tile_(row_tile) {}

 protected:
  using Operands = MmaOperands<T, Float8, D>;
  static constexpr int kDimTiles = D / 64;      // products of 64 dimensions
  static constexpr float kMinScore = -FLT_MAX;  // maximum of no scores; finite, so that differences are never NaN

  // A lane has rows lane % 4 * 2 and the next one of every 8, and two pairs of every 16 dimensions; see write_rows().
  using Sums = float[kRows / 8][2];
  using Out = float[kDimTiles][kRows / 8][4];

  __device__ static void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * kWarp) : "memory"); }

  // Load the rows from first_row on, 16 per warp, in the order of Operands, with zeros past the request.
  __device__ void load_q(const Segment& s, int first_row) {
    sync_consumers();  // no warp reads the rows of the previous segment any more
    if (16 * warp_ < kRows) load_q_of_warp(s, first_row);
    sync_consumers();
  }
  __device__ void load_q_of_warp(const Segment& s, int first_row) {
    const int my_row = first_row + 16 * warp_ + lane_ / 4;
    const T* rows[2] = {q_row<T>(p_, plan_, s, my_row), q_row<T>(p_, plan_, s, my_row + 8)};
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
      if (lane_ % 4 == 0) {
        shared_.cap_scale[row] = scale.of[h];
#pragma unroll
        for (auto& state : shared_.state) state[row] = {kMinScore, p_.soft_cap == 0 ? scale.of[h] : 1};
      }
    }
    fence_for_wgmma();
  }

  // Rows that a warpgroup writes: all of them, or one half for each of two warpgroups.
  static constexpr int kMine = kRows / 8 / kWarpgroups;
  using MyOut = float[kDimTiles][kMine][4];

  // Reduce both warpgroups' partial results of the rows that this one writes, times their factors, through the memory
  // of q and weights, which is free by now.
  __device__ void exchange(const Out& out, MyOut& mine) const {
    static_assert(sizeof(shared_.q) + sizeof(shared_.weights) >=
                  sizeof(float4) * kDimTiles * kRows / 8 * kWarpgroupThreads);
    const auto place = [&](int of_warpgroup, int m, int i) {
      return reinterpret_cast<float4*>(shared_.q) + ((of_warpgroup * kDimTiles + m) * kMine + i) * kWarpgroupThreads +
             thread_of_warpgroup_;
    };
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m)
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        float give[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          give[e] = warpgroup_ == 0 ? out[m][kMine + i][e] : out[m][i][e];
          mine[m][i][e] = warpgroup_ == 0 ? out[m][i][e] : out[m][kMine + i][e];
        }
        *place(warpgroup_, m, i) = make_float4(give[0], give[1], give[2], give[3]);
      }
    sync_consumers();
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m)
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const float4 y = *place(1 - warpgroup_, m, i);
        const float other[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 8 * (warpgroup_ * kMine + i) + lane_ % 4 * 2 + e % 2;
          const float a = warpgroup_ == 0 ? mine[m][i][e] : other[e], b = warpgroup_ == 0 ? other[e] : mine[m][i][e];
          mine[m][i][e] = a * shared_.factor[0][row] + b * shared_.factor[1][row];
        }
      }
  }

  __device__ void write(const Segment& s, int first_row, const Sums& sums, const Out& out) {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = sums[n][c];
        for (int step = 4; step < kWarp; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
        if (lane_ < 4) shared_.warp_partials[warp_][8 * n + lane_ % 4 * 2 + c] = sum;
      }
    sync_consumers();
    const int end = s.request.valid_rows * plan_.gqa_group.divisor;
    float* partial = s.splits > 1 ? partial_of(p_, plan_, s.partial, row_tile_, D) : nullptr;
    if (threadIdx.x < kRows) {
      const int row = threadIdx.x;
      float max = kMinScore, sum = 0;
      for (const auto& state : shared_.state) max = fmaxf(max, state[row].max);
      for (int w = 0; w < kConsumers; ++w)
        sum += shared_.warp_partials[w][row] * exp2_fast(shared_.state[w / 4][row].max - max);
      for (int g = 0; g < kWarpgroups; ++g)
        shared_.factor[g][row] = exp2_fast(shared_.state[g][row].max - max) * (partial != nullptr ? 1
                                                                               : sum == 0         ? 0
                                                                                                  : p_.v_scale / sum);
      if (sum == 0) max = -INFINITY;
      if (partial != nullptr) {
        partial[kRows * D + row] = max;
        partial[kRows * (D + 1) + row] = sum;
      } else if (first_row + row < end) {
        store_lse(p_, s.request, query_row(plan_, s.kv_head, first_row + row), max, sum);
      }
    }
    if constexpr (kWarpgroups == 2) {
      MyOut mine;
      exchange(out, mine);
      write_rows(s, first_row, partial, mine);
    } else {
      sync_consumers();
      MyOut mine;
#pragma unroll
      for (int m = 0; m < kDimTiles; ++m)
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) mine[m][n][e] = out[m][n][e] * shared_.factor[0][8 * n + lane_ % 4 * 2 + e % 2];
      write_rows(s, first_row, partial, mine);
    }
  }

  __device__ void write_rows(const Segment& s, int first_row, float* partial, const MyOut& out) const {
    const int end = s.request.valid_rows * plan_.gqa_group.divisor;
    // A lane has pairs of adjacent dimensions, and eight lanes those of 16.
    const int first_column = 16 * kDimTiles * warp_of_warpgroup_ + lane_ / 4 * 2;
#pragma unroll
    for (int i = 0; i < kMine; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * (warpgroup_ * kMine + i) + lane_ % 4 * 2 + c;
        if (first_row + row >= end) continue;
        const QueryRow at = query_row(plan_, s.kv_head, first_row + row);
        T* to =
            static_cast<T*>(p_.out) + s.request.out_start + at.row * p_.out_strides.row + at.head * p_.out_strides.head;
#pragma unroll
        for (int m = 0; m < kDimTiles; ++m) {
          const float2 x = make_float2(out[m][i][c], out[m][i][2 + c]);
          const int column = first_column + 16 * m;
          if (partial != nullptr)
            *reinterpret_cast<float2*>(partial + row * D + column) = x;
          else
            *reinterpret_cast<uint32_t*>(to + column) = pack<T>(x.x, x.y);
        }
      }
  }

  Shared& shared_;
  const TreeAttentionParams& p_;
  const DevicePlan& plan_;
  const int row_tile_;
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp, lane_ = static_cast<int>(threadIdx.x) % kWarp;
  const int warp_of_warpgroup_ = warp_ % 4, thread_of_warpgroup_ = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  // The shuffle shows the compiler that the value is warp-uniform, so that it computes operand addresses once per warp.
  const int warpgroup_ = kWarpgroups == 1 ? 0 : __shfl_sync(kFullMask, warp_ / 4, 0);
};

}  // namespace specdec::attention
