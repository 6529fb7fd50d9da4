// The rows of a segment where they are the columns of what wgmma multiplies: how consumers begin with them, and how
// they put together what their warps have summed and write it.
#pragma once

#include <cfloat>

#include "attention/kv_stream.cuh"
#include "attention/merge_parts.cuh"
#include "attention/mma_operands.cuh"
#include "core/wgmma.cuh"

namespace specdec {

template <class T, int D, int kRows, class Stream>
class Fp8Rows {
 public:
  static constexpr int kConsumers = Stream::kConsumers, kGroups = kConsumers / 4, kGroupThreads = 128;
  using QueryTile = Stage<kRows, 2 * D>;  // of which k is used
  using WeightTile = Stage<Stream::kTokens, 2 * kRows>;

  // What is known of a row besides its sums.
  struct RowState {
    float max, scale;  // of the scores so far in powers of two, and what brings scores, capped, to those
  };
  struct Shared {
    Stream stream;
    alignas(1024) unsigned char q[kRows * 2 * D];
    alignas(1024) unsigned char weights[kGroups][Stream::kTokens * 2 * kRows];
    alignas(16) RowState state[kGroups][kRows];
    alignas(16) uint64_t seen[kGroups][kRows];  // bit j: the row sees token j of the tile
    alignas(16) float factor[kGroups][kRows];
    alignas(16) float before_cap[kRows];  // what scores are multiplied by before they are capped
    float of_warps[kConsumers][kRows];
  };

  __device__ Fp8Rows(Shared& shared, const TreeAttentionParams& p, const Cut& cut, int lane_of_worker)
      : shared_(shared), p_(p), cut_(cut), lane_of_worker_(lane_of_worker) {}

 protected:
  using Operands = MmaOperands<T, Float8, D>;
  static constexpr int kHalves = D / 64;       // products of 64 dimensions
  static constexpr float kNothing = -FLT_MAX;  // the maximum of no scores; differences to it are numbers

  // Of every 8 rows a lane has lane % 4 * 2 and the next one; of 16 dimensions two pairs, see write_rows().
  using Sums = float[kRows / 8][2];
  using Out = float[kHalves][kRows / 8][4];

  __device__ static void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * kWarp) : "memory"); }

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
      if (lane_ % 4 == 0) {
        shared_.before_cap[row] = scale.of[h];
#pragma unroll
        for (auto& state : shared_.state) state[row] = {kNothing, p_.soft_cap == 0 ? scale.of[h] : 1};
      }
    }
    show_to_wgmma();
  }

  // What a group gives its rows: all of them, or of two groups each half.
  static constexpr int kMine = kRows / 8 / kGroups;
  using MyOut = float[kHalves][kMine][4];

  // Of the rows that this group gives, the sums of both, times their factors: through the memory of q and weights,
  // which all have used.
  __device__ void exchange(const Out& out, MyOut& mine) const {
    static_assert(sizeof(shared_.q) + sizeof(shared_.weights) >= sizeof(float4) * kHalves * kRows / 8 * kGroupThreads);
    const auto place = [&](int of_group, int m, int i) {
      return reinterpret_cast<float4*>(shared_.q) + ((of_group * kHalves + m) * kMine + i) * kGroupThreads +
             group_thread_;
    };
#pragma unroll
    for (int m = 0; m < kHalves; ++m)
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        float give[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          give[e] = group_ == 0 ? out[m][kMine + i][e] : out[m][i][e];
          mine[m][i][e] = group_ == 0 ? out[m][i][e] : out[m][kMine + i][e];
        }
        *place(group_, m, i) = make_float4(give[0], give[1], give[2], give[3]);
      }
    sync_consumers();
#pragma unroll
    for (int m = 0; m < kHalves; ++m)
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const float4 y = *place(1 - group_, m, i);
        const float other[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 8 * (group_ * kMine + i) + lane_ % 4 * 2 + e % 2;
          const float a = group_ == 0 ? mine[m][i][e] : other[e], b = group_ == 0 ? other[e] : mine[m][i][e];
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
        if (lane_ < 4) shared_.of_warps[warp_][8 * n + lane_ % 4 * 2 + c] = sum;
      }
    sync_consumers();
    const int end = s.request.valid_rows * cut_.group.divisor;
    float* part = s.parts > 1 ? part_of(p_, cut_, s.part, lane_of_worker_, D) : nullptr;
    if (threadIdx.x < kRows) {
      const int row = threadIdx.x;
      float max = kNothing, sum = 0;
      for (const auto& state : shared_.state) max = fmaxf(max, state[row].max);
      for (int w = 0; w < kConsumers; ++w)
        sum += shared_.of_warps[w][row] * exp2_fast(shared_.state[w / 4][row].max - max);
      for (int g = 0; g < kGroups; ++g)
        shared_.factor[g][row] = exp2_fast(shared_.state[g][row].max - max) * (part != nullptr ? 1
                                                                               : sum == 0      ? 0
                                                                                               : p_.v_scale / sum);
      if (sum == 0) max = -INFINITY;
      if (part != nullptr) {
        part[kRows * D + row] = max;
        part[kRows * (D + 1) + row] = sum;
      } else if (first_row + row < end) {
        store_lse(p_, s.request, query_row(cut_, s.head, first_row + row), max, sum);
      }
    }
    if constexpr (kGroups == 2) {
      MyOut mine;
      exchange(out, mine);
      write_rows(s, first_row, part, mine);
    } else {
      sync_consumers();
      MyOut mine;
#pragma unroll
      for (int m = 0; m < kHalves; ++m)
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) mine[m][n][e] = out[m][n][e] * shared_.factor[0][8 * n + lane_ % 4 * 2 + e % 2];
      write_rows(s, first_row, part, mine);
    }
  }

  __device__ void write_rows(const Segment& s, int first_row, float* part, const MyOut& out) const {
    const int end = s.request.valid_rows * cut_.group.divisor;
    // A lane has pairs of neighbouring dimensions, eight lanes those of 16.
    const int first_column = 16 * kHalves * group_warp_ + lane_ / 4 * 2;
#pragma unroll
    for (int i = 0; i < kMine; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * (group_ * kMine + i) + lane_ % 4 * 2 + c;
        if (first_row + row >= end) continue;
        const QueryRow at = query_row(cut_, s.head, first_row + row);
        T* to =
            static_cast<T*>(p_.out) + s.request.out_start + at.row * p_.out_strides.row + at.head * p_.out_strides.head;
#pragma unroll
        for (int m = 0; m < kHalves; ++m) {
          const float2 x = make_float2(out[m][i][c], out[m][i][2 + c]);
          const int column = first_column + 16 * m;
          if (part != nullptr)
            *reinterpret_cast<float2*>(part + row * D + column) = x;
          else
            *reinterpret_cast<uint32_t*>(to + column) = pack<T>(x.x, x.y);
        }
      }
  }

  Shared& shared_;
  const TreeAttentionParams& p_;
  const Cut& cut_;
  const int lane_of_worker_;
  const int warp_ = static_cast<int>(threadIdx.x) / kWarp, lane_ = static_cast<int>(threadIdx.x) % kWarp;
  const int group_warp_ = warp_ % 4, group_thread_ = static_cast<int>(threadIdx.x) % kGroupThreads;
  // Known to be the same for a warp, so that operands' places are computed once for all its lanes.
  const int group_ = kGroups == 1 ? 0 : __shfl_sync(kFullMask, warp_ / 4, 0);
};

}  // namespace specdec
