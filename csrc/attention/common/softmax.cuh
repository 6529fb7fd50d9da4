// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) of one warp's 16 query rows over KV tiles, in registers.
//
// The layout is the C fragment of both mma.sync and wgmma: a lane holds rows lane / 4 and lane / 4 + 8, and of every 8
// columns (tokens of the scores, dimensions of the output) columns lane % 4 * 2 and the next one.
#pragma once

#include "attention/common/stream_k.cuh"
#include "attention/tree_attention.h"
#include "core/floats.h"

namespace specdec::attention {

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Pack two floats into one register of T, `low` in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(x);
  } else {
    const __half2 x = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(x);
  }
}

// Pack softmax weights as the A operand of mma and wgmma. 16 tokens take four registers: rows lane / 4 and + 8 of the
// lower eight tokens, then of the upper eight.
template <class T, int N>
__device__ __forceinline__ void pack_weights(const float (&scores)[N][4], uint32_t (&weights)[N / 2][4]) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        weights[n][2 * c + h] = pack<T>(scores[2 * n + c][2 * h], scores[2 * n + c][2 * h + 1]);
}

// Scale factors of a lane's two rows of scores; positive.
struct Scale {
  float of[2];
};

template <int D>
struct OnlineSoftmax {
  float out[D / 8][4];  // unnormalized: not yet divided by sum
  float max[2];         // running maximum of the scores, in log2 units
  float sum[2];         // of 2^(score - max), over this lane's columns only

  __device__ void clear() {
#pragma unroll
    for (auto& o : out) o[0] = o[1] = o[2] = o[3] = 0;
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  // Apply the soft cap, if there is one. `scale` converts raw scores to log2 units; return the factors that still have
  // to be applied to the (capped) scores.
  template <int N>
  __device__ static Scale cap(const TreeAttentionParams& p, Scale scale, float (&scores)[N][4]) {
    if (p.soft_cap == 0) return scale;
    const float factor[2] = {scale.of[0] / p.soft_cap, scale.of[1] / p.soft_cap};
#pragma unroll
    for (auto& s : scores)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[e] = p.soft_cap * tanh_fast(s[e] * factor[e / 2]);
    return {1, 1};
  }

  // Set masked scores to -inf. Bit j of visible[h]: row lane / 4 + 8 h attends to the token of column j.
  template <int N>
  __device__ static void mask(const uint64_t (&visible)[2], float (&scores)[N][4]) {
    const int column = threadIdx.x % 4 * 2;
    const uint64_t mine[2] = {visible[0] >> column, visible[1] >> column};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(mine[e / 2] >> (8 * n + e % 2) & 1)) scores[n][e] = -INFINITY;
  }

  // Factors by which a new maximum rescales earlier sums.
  struct Rescale {
    float factor[2];
    bool any;  // whether some row of the warp is rescaled
  };

  // Turn a tile's scores, which `scale` converts to log2 units, into softmax weights. The caller still has to rescale()
  // `out`.
  template <int N>
  __device__ Rescale softmax(Scale scale, float (&scores)[N][4]) {
    // Weights up to 2^8 are harmless, so keep a maximum until it grows by more: then few tiles rescale sums or reduce
    // maxima over whole rows.
    constexpr float kRescaleThreshold = 8;
    float tile_max[2] = {-INFINITY, -INFINITY};  // over this lane's columns
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) tile_max[e / 2] = fmaxf(tile_max[e / 2], scores[n][e]);
    const auto exceeds = [&](int h) { return tile_max[h] * scale.of[h] > max[h] + kRescaleThreshold; };
    Rescale rescale_by{{1, 1}, __any_sync(kFullMask, exceeds(0) || exceeds(1)) != 0};
    if (rescale_by.any)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        for (int step = 1; step <= 2; step *= 2)
          tile_max[h] = fmaxf(tile_max[h], __shfl_xor_sync(kFullMask, tile_max[h], step));
        if (exceeds(h)) {  // decided per row, so that no row depends on its neighbors
          const float next = tile_max[h] * scale.of[h];
          rescale_by.factor[h] = exp2_fast(max[h] - next);
          max[h] = next;
          sum[h] *= rescale_by.factor[h];
        }
      }
    // Before any visible token, compute 2^(-inf - 0) rather than 2^(-inf + inf).
    const float origin[2] = {max[0] == -INFINITY ? 0 : max[0], max[1] == -INFINITY ? 0 : max[1]};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = exp2_fast(fmaf(scores[n][e], scale.of[e / 2], -origin[e / 2]));
        sum[e / 2] += scores[n][e];
      }
    return rescale_by;
  }

  __device__ void rescale(const Rescale& rescale_by) {
    if (!rescale_by.any) return;
#pragma unroll
    for (auto& o : out)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] *= rescale_by.factor[e / 2];
  }

  // Reduce over the four lanes of a row: `sum` becomes the sum of whole rows.
  __device__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kFullMask, sum[h], 1);
      sum[h] += __shfl_xor_sync(kFullMask, sum[h], 2);
    }
  }
};

// Store four adjacent columns of one row of out.
template <class T>
__device__ __forceinline__ void store_out(const AttentionCall& p, const Request& r, QueryRow at, int column, float4 x) {
  T* out = static_cast<T*>(p.out) + r.out_start + at.row * p.out_strides.row + at.head * p.out_strides.head + column;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack<T>(x.x, x.y), pack<T>(x.z, x.w));
}
__device__ __forceinline__ void store_lse(const AttentionCall& p, const Request& r, QueryRow at, float max, float sum) {
  if (p.lse != nullptr)
    p.lse[(r.flat_row + at.row) * p.q_heads + at.head] =
        sum == 0 ? -INFINITY : (max + log2f(sum)) * 0.6931471805599453f;
}

}  // namespace specdec::attention
