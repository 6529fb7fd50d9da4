// How a warp multiplies its 16 rows by the K and V of a stage with mma.sync: for pools of 16 bits, and for pools of 8
// bits, which are dequantised in registers.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "attention/common/softmax.cuh"
#include "core/mma.cuh"

namespace specdec::attention {

// Where row n of a segment's request and KV head begins; null behind the request.
template <class T>
__device__ __forceinline__ const T* q_row(const TreeAttentionParams& p, const DevicePlan& plan, const Segment& s,
                                          int n) {
  if (n >= s.request.valid_rows * plan.gqa_group.divisor) return nullptr;
  const QueryRow at = query_row(plan, s.kv_head, n);
  return static_cast<const T*>(p.q) + s.request.q_start + at.row * p.q_strides.row + at.head * p.q_strides.head;
}

// Reads fragments 0 to kCount - 1, each four fragments ahead of its use: shared memory takes longer to deliver one than
// the tensor cores to multiply it.
template <int kCount>
struct Pipeline {
  static constexpr int kAhead = 4;
  uint32_t b[kAhead][4];

  template <class Read>
  __device__ __forceinline__ void begin(Read&& read) {
#pragma unroll
    for (int i = 0; i < kAhead && i < kCount; ++i) read(i, b[i]);
  }
  // Calls use(i, b) for each in order.
  template <class Read, class Use>
  __device__ __forceinline__ void run(Read&& read, Use&& use) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      use(i, b[i % kAhead]);
      if (i + kAhead < kCount) read(i + kAhead, b[i % kAhead]);
    }
  }
};

// Reads values for a Pipeline, of the tokens from first_token on: fragment i is block i % kBlocks, that is 32 bytes of
// the values of 16 tokens, transposed in units of 16 bits.
template <int kBlocks, class Stage>
__device__ __forceinline__ auto read_values(const Stage& kv, int first_token) {
  return [&kv, first_token](int i, uint32_t (&b)[4]) {
    const int lane = threadIdx.x % kWarp, row = first_token + 16 * (i / kBlocks) + lane % 16;
    cute::SM75_U16x8_LDSM_T::copy(
        *reinterpret_cast<const cute::uint128_t*>(kv.v + kv.offset(row, 2 * (i % kBlocks) + lane / 16)), b[0], b[1],
        b[2], b[3]);
  };
}

// Operands of queries and pools of T.
template <class T, class Kv, int D>
struct MmaOperands {
  using Factor = T;                 // the type that is multiplied
  static constexpr int kStep = 64;  // tokens at once, at most
  uint32_t q[D / 16][4];            // query rows as A fragments

  // Loads a lane's two rows, lane / 4 and lane / 4 + 8, from where they begin; null: they are behind the request.
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

  // scores = q k^T for the tokens from first_token on.
  template <class Stage, int N>
  __device__ __forceinline__ void multiply_k(const Stage& kv, int first_token, float (&scores)[N][4]) const {
    constexpr int kAtOnce = N / 2;
    constexpr int kChains = kAtOnce == 1 ? 2 : 1;  // sums of a score that do not wait for each other
    const int lane = threadIdx.x % kWarp;
    float sums[kChains][N][4]{};
    const auto read = [&](int i, uint32_t (&b)[4]) {
      // 16 tokens by 16 dimensions: lanes 0-7 and 16-23 name tokens 0-7 and 8-15 of the lower 8 dimensions, the others
      // of the upper 8.
      const int row = first_token + 16 * (i % kAtOnce) + lane % 8 + lane / 16 * 8;
      cute::SM75_U32x4_LDSM_N::copy(
          *reinterpret_cast<const cute::uint128_t*>(kv.k + kv.offset(row, 2 * (i / kAtOnce) + lane / 8 % 2)), b[0],
          b[1], b[2], b[3]);
    };
    Pipeline<D / 16 * kAtOnce> keys;
    keys.begin(read);
    keys.run(read, [&](int i, const uint32_t (&b)[4]) {
      auto& sum = sums[i / kAtOnce % kChains];
      mma<T>(sum[2 * (i % kAtOnce)], q[i / kAtOnce], b[0], b[1]);
      mma<T>(sum[2 * (i % kAtOnce) + 1], q[i / kAtOnce], b[2], b[3]);
    });
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = kChains == 1 ? sums[0][n][e] : sums[0][n][e] + sums[kChains - 1][n][e];
  }

  static constexpr int kBlocks = D / 16;  // fragments of 16 tokens' values
  template <class Stage>
  __device__ __forceinline__ static auto read_v(const Stage& kv, int first_token) {
    return read_values<kBlocks>(kv, first_token);
  }

  // out += weights v for the tokens from first_token on, whose values a Pipeline has begun to read. Tokens outside
  // `met` have weight 0 in all rows, and their values may be NaN.
  template <class Stage, int N>
  __device__ __forceinline__ static void add_v(const Stage& kv, int first_token, const uint32_t (&weights)[N][4],
                                               uint64_t met, Pipeline<N * kBlocks>& values, float (&out)[D / 8][4]) {
    const auto use = [&](int i, const uint32_t (&b)[4]) {
      mma<T>(out[2 * (i % kBlocks)], weights[i / kBlocks], b[0], b[1]);
      mma<T>(out[2 * (i % kBlocks) + 1], weights[i / kBlocks], b[2], b[3]);
    };
    if constexpr (N == 1)
      if (met == ~uint64_t{0}) return values.run(read_v(kv, first_token), use);
    const int lane = threadIdx.x % kWarp;
    uint32_t keep[N][2];  // masks of a register's two values: of tokens 0-7, of tokens 8-15
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) {
      const uint32_t tokens = static_cast<uint32_t>(met >> (8 * n + lane % 4 * 2));
      keep[n / 2][n % 2] = (tokens & 1 ? 0xffffu : 0) | (tokens & 2 ? 0xffff0000u : 0);
    }
    values.run(read_v(kv, first_token), [&](int i, uint32_t (&b)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) b[e] &= keep[i / kBlocks][e % 2];
      use(i, b);
    });
  }

  // Calls store(dimension, pair of floats) for 16 dimensions of `out` from 16 n on, of row lane / 4 + 8 h.
  template <class Store>
  __device__ __forceinline__ static void spread(const float (&out)[D / 8][4], int n, int h, Store&& store) {
    const int column = 16 * n + threadIdx.x % 4 * 2;
    store(column, make_float2(out[2 * n][2 * h], out[2 * n][2 * h + 1]));
    store(column + 8, make_float2(out[2 * n + 1][2 * h], out[2 * n + 1][2 * h + 1]));
  }
};

// Dequantises four 8-bit floats to Half, in order. From compute capability 8.9 on two take one instruction.
__device__ __forceinline__ void dequantise(uint32_t x, uint32_t& low, uint32_t& high) {
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

// Makes Half of pairs of BFloat16, a quarter of a row in each of four neighbouring lanes. Brings the largest number
// below 2^15 by a power of two, and returns the factor that undoes it.
template <int N>
__device__ __forceinline__ float scale_to_half(uint32_t (&pairs)[N]) {
  constexpr int kTop = 14, kLeast = -40;  // exponents; a smaller row has no score worth mentioning
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
  float top = 0;
#pragma unroll
  for (const uint32_t x : pairs) top = fmaxf(top, fmaxf(fabsf(low(x)), fabsf(high(x))));
  top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
  const int exponent = max(static_cast<int>(__float_as_uint(top) >> 23) - 127, kLeast) - kTop;
  const float factor = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
  for (uint32_t& x : pairs) x = pack<Half>(low(x) * factor, high(x) * factor);
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// Operands of 8-bit pools. They are multiplied as Half, which holds every 8-bit float and NaN, and become Half in
// registers, on the way from shared memory.
template <class T, int D>
struct MmaOperands<T, Float8, D> {
  using Factor = Half;
  static constexpr int kStep = 32;
  uint32_t q[D / 16][4];

  // Dimensions that are summed over may be in any order: a lane reads 16 bytes of a token at a time, which are four
  // fragments, and q is ordered accordingly.
  static constexpr int kPieces = D / 64;  // pieces of 16 bytes that a lane reads
  __device__ static int piece_of_lane(int i) {
    return D == 64 ? threadIdx.x % 4 : i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
  }

  // Rows of BFloat16 are brought into the range of Half by a power of two each, which keeps all bits that matter.
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
  __device__ __forceinline__ void multiply_k(const Stage& kv, int first_token, float (&scores)[N][4]) const {
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
          dequantise((&b[i % 2][n].x)[j], low, high);
          mma<Half>(scores[n], q[4 * i + j], low, high);
        }
    }
  }

  static constexpr int kBlocks = D / 32;
  template <class Stage>
  __device__ __forceinline__ static auto read_v(const Stage& kv, int first_token) {
    return read_values<kBlocks>(kv, first_token);
  }

  // ldmatrix transposes pairs of bytes, that is two dimensions of a token. A register so holds two tokens' pairs, and
  // one byte permutation makes pairs of tokens of them.
  template <class Stage, int N>
  __device__ __forceinline__ static void add_v(const Stage& kv, int first_token, const uint32_t (&weights)[N][4],
                                               uint64_t met, Pipeline<N * kBlocks>& values, float (&out)[D / 8][4]) {
    const int lane = threadIdx.x % kWarp;
    uint32_t keep[N][2];  // masks of a register's four values: of tokens 0-7, of tokens 8-15
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) {
      const uint32_t tokens = static_cast<uint32_t>(met >> (8 * n + lane % 4 * 2));
      keep[n / 2][n % 2] = (tokens & 1 ? 0x00ff00ffu : 0) | (tokens & 2 ? 0xff00ff00u : 0);
    }
    values.run(read_v(kv, first_token), [&](int i, const uint32_t (&b)[4]) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // the even dimensions of 16, then the odd ones
        uint32_t even[2], odd[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
          dequantise(__byte_perm(b[2 * e + c], 0, 0x3120) & keep[i / kBlocks][c], even[c], odd[c]);
        mma<Half>(out[4 * (i % kBlocks) + 2 * e], weights[i / kBlocks], even[0], even[1]);
        mma<Half>(out[4 * (i % kBlocks) + 2 * e + 1], weights[i / kBlocks], odd[0], odd[1]);
      }
    });
  }

  template <class Store>
  __device__ __forceinline__ static void spread(const float (&out)[D / 8][4], int n, int h, Store&& store) {
    const int column = 16 * n + threadIdx.x % 4 * 4;
    store(column, make_float2(out[2 * n][2 * h], out[2 * n + 1][2 * h]));
    store(column + 2, make_float2(out[2 * n][2 * h + 1], out[2 * n + 1][2 * h + 1]));
  }
};

}  // namespace specdec::attention
