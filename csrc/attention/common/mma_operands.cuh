// mma.sync operands of tree_attention: how a warp multiplies its 16 query rows by the K and V tiles of a stage. Two
// versions: 16-bit pools, and FP8 pools, which are dequantized in registers.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "attention/common/softmax.cuh"
#include "core/mma.cuh"

namespace specdec::attention {

// Return a pointer to row n of a segment's request and KV head, or null past the request's last row.
template <class T>
__device__ __forceinline__ const T* q_row(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                          int n) {
  if (n >= s.request.valid_rows * plan.gqa_group.divisor) return nullptr;
  const QueryRow at = query_row(plan, s.kv_head, n);
  return static_cast<const T*>(p.q) + s.request.q_start + at.row * p.q_strides.row + at.head * p.q_strides.head;
}

// Software-pipeline fragment loads: read fragments 0 to kCount - 1, each kPrefetch = 4 fragments ahead of its use,
// because shared memory takes longer to deliver a fragment than the tensor cores to consume it.
template <int kCount>
struct FragmentPipeline {
  static constexpr int kPrefetch = 4;
  uint32_t b[kPrefetch][4];

  template <class Read>
  __device__ __forceinline__ void begin(Read&& read) {
#pragma unroll
    for (int i = 0; i < kPrefetch && i < kCount; ++i) read(i, b[i]);
  }
  // Call use(i, b) for each fragment in order.
  template <class Read, class Use>
  __device__ __forceinline__ void run(Read&& read, Use&& use) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      use(i, b[i % kPrefetch]);
      if (i + kPrefetch < kCount) read(i + kPrefetch, b[i % kPrefetch]);
    }
  }
};

// Return a FragmentPipeline reader of V for the tokens from first_token on. Fragment i is block i % kFragments of 16
// tokens: 32 bytes of their values, transposed in units of 16 bits.
template <int kFragments, class Stage>
__device__ __forceinline__ auto read_values(const Stage& kv, int first_token) {
  return [&kv, first_token](int i, uint32_t (&b)[4]) {
    const int lane = threadIdx.x % kWarp, row = first_token + 16 * (i / kFragments) + lane % 16;
    cute::SM75_U16x8_LDSM_T::copy(
        *reinterpret_cast<const cute::uint128_t*>(kv.v + kv.offset(row, 2 * (i % kFragments) + lane / 16)), b[0], b[1],
        b[2], b[3]);
  };
}

// Operands for queries and pools of the same 16-bit type T.
template <class T, class Kv, int D>
struct MmaOperands {
  using MmaElement = T;             // input type of the MMA
  static constexpr int kStep = 64;  // maximum tokens per step
  uint32_t q[D / 16][4];            // query rows as A fragments

  // Load a lane's two rows, lane / 4 and lane / 4 + 8, from the given pointers; null (past the request) loads zeros.
  __device__ Scale load(float scale, const T* const (&rows)[2]) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          q[k][2 * c + h] = rows[h] ? *reinterpret_cast<const uint32_t*>(rows[h] + 16 * k + 8 * c + lane % 4 * 2) : 0;
    return {scale, scale};
  }

  // Compute scores = q k^T for the tokens from first_token on.
  template <class Stage, int N>
  __device__ __forceinline__ void multiply_qk(const Stage& kv, int first_token, float (&scores)[N][4]) const {
    constexpr int kTokenBlocks = N / 2;
    // Independent accumulators per score, to break dependency chains.
    constexpr int kChains = kTokenBlocks == 1 ? 2 : 1;
    const int lane = threadIdx.x % kWarp;
    float sums[kChains][N][4]{};
    const auto read = [&](int i, uint32_t (&b)[4]) {
      // ldmatrix of 16 tokens by 16 dimensions: lanes 0-7 and 16-23 address tokens 0-7 and 8-15 of the lower 8
      // dimensions, the other lanes those of the upper 8.
      const int row = first_token + 16 * (i % kTokenBlocks) + lane % 8 + lane / 16 * 8;
      cute::SM75_U32x4_LDSM_N::copy(
          *reinterpret_cast<const cute::uint128_t*>(kv.k + kv.offset(row, 2 * (i / kTokenBlocks) + lane / 8 % 2)), b[0],
          b[1], b[2], b[3]);
    };
    FragmentPipeline<D / 16 * kTokenBlocks> keys;
    keys.begin(read);
    keys.run(read, [&](int i, const uint32_t (&b)[4]) {
      auto& sum = sums[i / kTokenBlocks % kChains];
      mma<T>(sum[2 * (i % kTokenBlocks)], q[i / kTokenBlocks], b[0], b[1]);
      mma<T>(sum[2 * (i % kTokenBlocks) + 1], q[i / kTokenBlocks], b[2], b[3]);
    });
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = kChains == 1 ? sums[0][n][e] : sums[0][n][e] + sums[kChains - 1][n][e];
  }

  static constexpr int kFragments = D / 16;  // fragments of V per 16 tokens
  template <class Stage>
  __device__ __forceinline__ static auto read_v(const Stage& kv, int first_token) {
    return read_values<kFragments>(kv, first_token);
  }

  // Compute out += weights v for the tokens from first_token on, whose V reads a FragmentPipeline has already begun.
  // Tokens outside `any_visible` have weight 0 in all rows, and their V may be NaN, so it is masked to zero.
  template <class Stage, int N>
  __device__ __forceinline__ static void accumulate_pv(const Stage& kv, int first_token,
                                                       const uint32_t (&weights)[N][4], uint64_t any_visible,
                                                       FragmentPipeline<N * kFragments>& values,
                                                       float (&out)[D / 8][4]) {
    const auto use = [&](int i, const uint32_t (&b)[4]) {
      mma<T>(out[2 * (i % kFragments)], weights[i / kFragments], b[0], b[1]);
      mma<T>(out[2 * (i % kFragments) + 1], weights[i / kFragments], b[2], b[3]);
    };
    if constexpr (N == 1)
      if (any_visible == ~uint64_t{0}) return values.run(read_v(kv, first_token), use);
    const int lane = threadIdx.x % kWarp;
    uint32_t keep[N][2];  // AND masks of a register's two values: tokens 0-7, tokens 8-15
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) {
      const uint32_t tokens = static_cast<uint32_t>(any_visible >> (8 * n + lane % 4 * 2));
      keep[n / 2][n % 2] = (tokens & 1 ? 0xffffu : 0) | (tokens & 2 ? 0xffff0000u : 0);
    }
    values.run(read_v(kv, first_token), [&](int i, uint32_t (&b)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) b[e] &= keep[i / kFragments][e % 2];
      use(i, b);
    });
  }

  // Call store(dimension, pair of floats) for the 16 dimensions of `out` from 16 n on, of row lane / 4 + 8 h.
  template <class Store>
  __device__ __forceinline__ static void visit_columns(const float (&out)[D / 8][4], int n, int h, Store&& store) {
    const int column = 16 * n + threadIdx.x % 4 * 2;
    store(column, make_float2(out[2 * n][2 * h], out[2 * n][2 * h + 1]));
    store(column + 8, make_float2(out[2 * n + 1][2 * h], out[2 * n + 1][2 * h + 1]));
  }
};

// Dequantize four FP8 (e4m3) values to Half, in order. From compute capability 8.9 on, one instruction converts two.
__device__ __forceinline__ void dequantize(uint32_t x, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x));
#else
  const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(x), __NV_E4M3);
  const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(x >> 16), __NV_E4M3);
  low = a.x | static_cast<uint32_t>(a.y) << 16;
  high = b.x | static_cast<uint32_t>(b.y) << 16;
#endif
}

// Convert BFloat16 pairs to Half in place; four adjacent lanes hold a quarter of a row each. Scale the row by a power
// of two so that its largest magnitude is below 2^15, and return the factor that undoes the scaling.
template <int N>
__device__ __forceinline__ float scale_to_half(uint32_t (&pairs)[N]) {
  constexpr int kMaxExponent = 14, kMinExponent = -40;  // exponents; a row below 2^kLeast has negligible scores
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
  float max_abs = 0;
#pragma unroll
  for (const uint32_t x : pairs) max_abs = fmaxf(max_abs, fmaxf(fabsf(low(x)), fabsf(high(x))));
  max_abs = fmaxf(max_abs, __shfl_xor_sync(kFullMask, max_abs, 1));
  max_abs = fmaxf(max_abs, __shfl_xor_sync(kFullMask, max_abs, 2));
  const int exponent = max(static_cast<int>(__float_as_uint(max_abs) >> 23) - 127, kMinExponent) - kMaxExponent;
  const float factor = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
  for (uint32_t& x : pairs) x = pack<Half>(low(x) * factor, high(x) * factor);
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// Operands for FP8 pools. FP8 is dequantized to Half in registers, after loading from shared memory, and multiplied as
// Half, which represents every e4m3 value and NaN exactly.
template <class T, int D>
struct MmaOperands<T, Float8, D> {
  using MmaElement = Half;
  static constexpr int kStep = 32;
  uint32_t q[D / 16][4];

  // The order of dimensions that are summed over is free: a lane reads 16 bytes of a token at a time, which make four
  // fragments, and q is permuted to match.
  static constexpr int kPieces = D / 64;  // 16-byte pieces that a lane reads of each row
  __device__ static int piece_of_lane(int i) {
    return D == 64 ? threadIdx.x % 4 : i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
  }

  // BFloat16 rows are scaled into the range of Half by a power of two per row, which keeps all significant bits.
  __device__ Scale load(float scale, const T* const (&rows)[2]) {
    Scale scales{scale, scale};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 x = rows[h] ? *reinterpret_cast<const uint4*>(rows[h] + 16 * piece_of_lane(i) + 8 * j) : uint4{};
          q[4 * i + 2 * j][h] = x.x, q[4 * i + 2 * j][2 + h] = x.y;
          q[4 * i + 2 * j + 1][h] = x.z, q[4 * i + 2 * j + 1][2 + h] = x.w;
        }
      if constexpr (std::is_same_v<T, BFloat16>) {
        uint32_t pairs[D / 8];
#pragma unroll
        for (int k = 0; k < D / 8; ++k) pairs[k] = q[k / 2][k % 2 * 2 + h];
        scales.of[h] *= scale_to_half(pairs);
#pragma unroll
        for (int k = 0; k < D / 8; ++k) q[k / 2][k % 2 * 2 + h] = pairs[k];
      }
    }
    return scales;
  }

  template <class Stage, int N>
  __device__ __forceinline__ void multiply_qk(const Stage& kv, int first_token, float (&scores)[N][4]) const {
    const int row = first_token + threadIdx.x % kWarp / 4;
    const auto read = [&](int i, uint4(&b)[N]) {
#pragma unroll
      for (int n = 0; n < N; ++n)
        b[n] = *reinterpret_cast<const uint4*>(kv.k + kv.offset(row + 8 * n, piece_of_lane(i)));
    };
#pragma unroll
    for (auto& s : scores) s[0] = s[1] = s[2] = s[3] = 0;
    uint4 b[2][N];
    read(0, b[0]);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i + 1 < kPieces) read(i + 1, b[(i + 1) % 2]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int n = 0; n < N; ++n) {
          uint32_t low, high;
          dequantize((&b[i % 2][n].x)[j], low, high);
          mma<Half>(scores[n], q[4 * i + j], low, high);
        }
    }
  }

  static constexpr int kFragments = D / 32;
  template <class Stage>
  __device__ __forceinline__ static auto read_v(const Stage& kv, int first_token) {
    return read_values<kFragments>(kv, first_token);
  }

  // ldmatrix.trans transposes pairs of bytes, i.e. two dimensions of a token. So a register holds the byte pairs of two
  // tokens, and one byte permutation regroups them into pairs of tokens.
  template <class Stage, int N>
  __device__ __forceinline__ static void accumulate_pv(const Stage& kv, int first_token,
                                                       const uint32_t (&weights)[N][4], uint64_t any_visible,
                                                       FragmentPipeline<N * kFragments>& values,
                                                       float (&out)[D / 8][4]) {
    const int lane = threadIdx.x % kWarp;
    uint32_t keep[N][2];  // AND masks of a register's four values: tokens 0-7, tokens 8-15
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) {
      const uint32_t tokens = static_cast<uint32_t>(any_visible >> (8 * n + lane % 4 * 2));
      keep[n / 2][n % 2] = (tokens & 1 ? 0x00ff00ffu : 0) | (tokens & 2 ? 0xff00ff00u : 0);
    }
    values.run(read_v(kv, first_token), [&](int i, const uint32_t (&b)[4]) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // the even dimensions of 16, then the odd ones
        uint32_t even[2], odd[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
          dequantize(__byte_perm(b[2 * e + c], 0, 0x3120) & keep[i / kFragments][c], even[c], odd[c]);
        mma<Half>(out[4 * (i % kFragments) + 2 * e], weights[i / kFragments], even[0], even[1]);
        mma<Half>(out[4 * (i % kFragments) + 2 * e + 1], weights[i / kFragments], odd[0], odd[1]);
      }
    });
  }

  template <class Store>
  __device__ __forceinline__ static void visit_columns(const float (&out)[D / 8][4], int n, int h, Store&& store) {
    const int column = 16 * n + threadIdx.x % 4 * 4;
    store(column, make_float2(out[2 * n][2 * h], out[2 * n + 1][2 * h]));
    store(column + 2, make_float2(out[2 * n][2 * h + 1], out[2 * n + 1][2 * h + 1]));
  }
};

}  // namespace specdec::attention
