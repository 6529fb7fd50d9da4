// What one warp knows of its 16 query rows: the online softmax (Milakov and Gimelshein, arXiv 1805.02867) over the
// tiles met so far, in the layout that both mma.sync and wgmma leave in registers. A lane holds rows lane / 4 and lane
// / 4 + 8, and of every 8 columns (tokens of a score, dimensions of the sum) lane % 4 * 2 and the next one.
#pragma once

#include "attention/work_line.cuh"
#include "core/floats.h"

namespace specdec {

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

// Two floats as one register of T, the lower one in the lower half.
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

template <int D>
struct WarpRows {
  float out[D / 8][4];  // not yet divided by sum
  float max[2];         // of the scores so far, in powers of two
  float sum[2];         // of 2^(score - max), this lane's columns

  __device__ void clear() {
#pragma unroll
    for (auto& o : out) o[0] = o[1] = o[2] = o[3] = 0;
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  // Caps scores, where they are capped. Returns the scale > 0 that brings them to powers of two.
  template <int N>
  __device__ static float cap(const TreeAttentionParams& p, float (&scores)[N][4]) {
    if (p.soft_cap == 0 && p.log2_scale > 0) return p.log2_scale;
#pragma unroll
    for (auto& s : scores)
#pragma unroll
      for (float& x : s) x *= p.log2_scale;
    if (p.soft_cap == 0) return 1;
    const float inverse = 1 / p.soft_cap;
#pragma unroll
    for (auto& s : scores)
#pragma unroll
      for (float& x : s) x = p.soft_cap * tanh_fast(x * inverse);
    return 1;
  }

  // Hides what a row does not see. Bit j of seen[h]: row lane / 4 + 8 h sees the token of column j.
  template <int N>
  __device__ static void hide(const uint64_t (&seen)[2], float (&scores)[N][4]) {
    const int column = threadIdx.x % 4 * 2;
    const uint64_t mine[2] = {seen[0] >> column, seen[1] >> column};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(mine[e / 2] >> (8 * n + e % 2) & 1)) scores[n][e] = -INFINITY;
  }

  // What a higher maximum makes of sums before it.
  struct Fall {
    float factor[2];
    bool any;  // some row of the warp has one
  };

  // Turns a tile's scores, times `scale` > 0 in powers of two, into weights. `out` is still to be brought to the same
  // maximum.
  template <int N>
  __device__ Fall weigh(float scale, float (&scores)[N][4]) {
    // Weights up to 2^8 do no harm, so a maximum that rises less stays: few tiles then touch what was summed.
    constexpr float kSlack = 8;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], scores[n][e]);
    Fall fall{{1, 1}, false};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(kFullMask, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(kFullMask, top[h], 2)) * scale;
      fall.any |= top[h] > max[h] + kSlack;
    }
    fall.any = __any_sync(kFullMask, fall.any);
    if (fall.any)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (top[h] > max[h] + kSlack) {  // each row by itself: none depends on its neighbours
          fall.factor[h] = exp2_fast(max[h] - top[h]);
          max[h] = top[h];
          sum[h] *= fall.factor[h];
        }
    // Nothing seen yet: 2^(-inf - 0), not 2^(-inf + inf).
    const float origin[2] = {max[0] == -INFINITY ? 0 : max[0], max[1] == -INFINITY ? 0 : max[1]};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = exp2_fast(fmaf(scores[n][e], scale, -origin[e / 2]));
        sum[e / 2] += scores[n][e];
      }
    return fall;
  }

  __device__ void follow(const Fall& fall) {
    if (!fall.any) return;
#pragma unroll
    for (auto& o : out)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] *= fall.factor[e / 2];
  }

  // The sums of whole rows, instead of this lane's columns.
  __device__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kFullMask, sum[h], 1);
      sum[h] += __shfl_xor_sync(kFullMask, sum[h], 2);
    }
  }
};

// Where row n of all the rows of a request and KV head is.
struct QueryRow {
  int row;   // of the request
  int head;  // of all query heads
};
__device__ __forceinline__ QueryRow query_row(const Cut& cut, int head, int n) {
  QueryRow at;
  cut.group(at.row, at.head, n);
  at.head += head * cut.group.divisor;
  return at;
}

// Partial results in the workspace, behind the cut groups: for each part the sums [rows, D] that the maxima [rows] and
// sums of weights [rows] behind them belong to.
__device__ __forceinline__ float* part_of(const TreeAttentionParams& p, const Cut& cut, int64_t part, int D) {
  return reinterpret_cast<float*>(cut_groups(p) + cut.max_workers) + part * cut.rows * (D + 2);
}

// Four neighbouring results of one row, to out.
template <class T>
__device__ __forceinline__ void store_out(const TreeAttentionParams& p, const Request& r, QueryRow at, int column,
                                          float4 x) {
  T* out = static_cast<T*>(p.out) + r.out_start + at.row * p.out_strides.row + at.head * p.out_strides.head + column;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack<T>(x.x, x.y), pack<T>(x.z, x.w));
}
__device__ __forceinline__ void store_lse(const TreeAttentionParams& p, const Request& r, QueryRow at, float max,
                                          float sum) {
  if (p.lse != nullptr)
    p.lse[(r.flat_row + at.row) * p.q_heads + at.head] =
        sum == 0 ? -INFINITY : (max + log2f(sum)) * 0.6931471805599453f;
}

// Writes the rows of a segment that the warps of one block have summed. kShares warps met the same 16 rows, each its
// own tokens: warp w has rows 16 (w / kShares) to + 15. Through `buffer`, at least kWarps * 16 * D floats, which nobody
// else uses.
template <class T, int D, int kWarps, int kShares>
struct SegmentWriter {
  static constexpr int kRows = kWarps / kShares * 16, kThreads = kWarps * kWarp;
  float max[kWarps][16], sum[kWarps][16];

  __device__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

  __device__ void write(const TreeAttentionParams& p, const Cut& cut, const Segment& s, int lane_of_worker,
                        WarpRows<D>& rows, float* buffer) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    rows.finish();
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[warp][lane / 4 + 8 * h] = rows.max[h];
        sum[warp][lane / 4 + 8 * h] = rows.sum[h];
      }
    }
    const int first = s.first_row + lane_of_worker * kRows;
    const int count = min(kRows, s.request.valid_rows * cut.group.divisor - first);
    sync();  // the buffer is free: its stage has been consumed
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* x = rows.out[n] + 2 * h;
        *reinterpret_cast<float2*>(place(buffer, warp, lane / 4 + 8 * h, 8 * n + lane % 4 * 2)) =
            make_float2(x[0], x[1]);
      }
    sync();
    for (int n = threadIdx.x; n < count * (D / 4); n += kThreads) {
      const int row = n / (D / 4), column = n % (D / 4) * 4, w = row / 16 * kShares;
      float top = max[w][row % 16], total = 0;
#pragma unroll
      for (int k = 1; k < kShares; ++k) top = fmaxf(top, max[w + k][row % 16]);
      float4 x{};
#pragma unroll
      for (int k = 0; k < kShares; ++k) {
        const float weight = top == -INFINITY ? 0 : exp2_fast(max[w + k][row % 16] - top);
        const float4 y = *reinterpret_cast<const float4*>(place(buffer, w + k, row % 16, column));
        x.x += weight * y.x, x.y += weight * y.y, x.z += weight * y.z, x.w += weight * y.w;
        total += weight * sum[w + k][row % 16];
      }
      if (s.part < 0) {
        const float factor = total == 0 ? 0 : p.v_scale / total;
        const QueryRow at = query_row(cut, s.head, first + row);
        store_out<T>(p, s.request, at, column, make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor));
        if (column == 0) store_lse(p, s.request, at, top, total);
      } else {
        float* part = part_of(p, cut, static_cast<int64_t>(s.part) * cut.lanes + lane_of_worker, D);
        *reinterpret_cast<float4*>(part + row * D + column) = x;
        if (column == 0) {
          part[kRows * D + row] = top;
          part[kRows * D + kRows + row] = total;
        }
      }
    }
  }

 private:
  // Rows are swizzled by 32 bytes: 8 lanes that write one column of 8 rows meet 8 different banks.
  __device__ static float* place(float* buffer, int warp, int row, int column) {
    return buffer + (warp * 16 + row) * D + ((column / 8 ^ row) % 8 * 8) + column % 8 + column / 64 * 64;
  }
};

}  // namespace specdec
