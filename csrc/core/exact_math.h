// Float arithmetic that gives the same bits on CPU and GPU: single IEEE operations in source order, fused only where
// fused() says so (-ffp-contract=off on the host, _rn intrinsics on the device), and no transcendental library
// functions.
//
// Float sums would still depend on the order of addition, which a parallel kernel does not keep. So sums are taken over
// integers: weights in units of 2^-40, whose sums are exact.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace specdec {

SD_HD float mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
SD_HD float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
SD_HD float sub(float a, float b) { return add(a, -b); }
SD_HD float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
SD_HD float div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

SD_HD uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return std::bit_cast<uint32_t>(x);
#endif
}
SD_HD float bits_float(uint32_t u) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(u);
#else
  return std::bit_cast<float>(u);
#endif
}

// Double precision, for the few values per request, not for every token.
SD_HD double mul(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
SD_HD double add(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}
SD_HD double div(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

// Map a float to an unsigned integer of the same order: -inf is the least, NaN counts as -inf, -0 equals +0.
SD_HD uint32_t order_key(float x) {
  const uint32_t u = float_bits(x == x ? add(x, 0.0f) : -INFINITY);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
constexpr uint32_t kKeyOfMinusInf = 0x007fffffu;

// Return the float of an order_key.
SD_HD float key_float(uint32_t key) { return bits_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Return 2^t for t <= 0 in units of 2^-40, rounded down: exactly 2^40 at t = 0, 0 below t = -40 and for NaN. Sums of up
// to kMostWeights of them fit 64 bits.
//
// t is split into an integer and a fraction in [0, 1); 2^fraction is a minimax polynomial (1.4e-7 relative error;
// exactly 1 at 0, below 2 at 1), whose 24 mantissa bits are shifted into place. About 20 instructions on a GPU.
constexpr int kWeightBits = 40;
constexpr int64_t kMostWeights = 1 << 23;
SD_HD uint64_t exp2_weight(float t) {
  constexpr float kLeast = -static_cast<float>(kWeightBits + 1), kInteger = 12582912.0f;  // 1.5 * 2^23
  t = t > kLeast ? t : kLeast;
  const float floor = floorf(t), rest = sub(t, floor);
  float m = 0x1.e974fap-10f;
  m = fused(m, rest, 0x1.277856p-7f);
  m = fused(m, rest, 0x1.c91ce6p-5f);
  m = fused(m, rest, 0x1.ebdb56p-3f);
  m = fused(m, rest, 0x1.62e4bap-1f);
  m = fused(m, rest, 1.0f);
  const uint32_t mantissa = (float_bits(m) & 0x7fffffu) | 0x800000u;  // m * 2^23
  const auto exponent = static_cast<int32_t>(float_bits(add(floor, kInteger)) - float_bits(kInteger));
  const int left = kWeightBits - 23 + exponent;  // -24 to 17
  // A product instead of a shift, so that accumulating a weight is one multiply-add.
  return static_cast<uint64_t>(mantissa >> (left < 0 ? -left : 0)) * (1u << (left > 0 ? left : 0));
}

// Return log2(1 + f) for f from -0.293 to 0.415, with 1.4e-7 relative error also near 0: f times a minimax polynomial.
SD_HD float log2_1p(float f) {
  float m = 0x1.01b6d6p-3f;
  m = add(mul(m, f), -0x1.a87d0ap-3f);
  m = add(mul(m, f), 0x1.b9c91ap-3f);
  m = add(mul(m, f), -0x1.e95be8p-3f);
  m = add(mul(m, f), 0x1.26d384p-2f);
  m = add(mul(m, f), -0x1.715c4ep-2f);
  m = add(mul(m, f), 0x1.ec73d6p-2f);
  m = add(mul(m, f), -0x1.715470p-1f);
  m = add(mul(m, f), 0x1.715476p+0f);
  return mul(m, f);
}

// Return log2(x) for a normal x > 0: the exponent that leaves a mantissa from sqrt(1/2) to sqrt(2), plus log2 of that
// mantissa.
SD_HD float log2_of(float x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3;
  const uint32_t above = float_bits(x) - kSqrtHalf;
  const int32_t exponent = static_cast<int32_t>(above) >> 23;
  const float mantissa = bits_float((above & 0x7fffff) + kSqrtHalf);
  return add(static_cast<float>(exponent), log2_1p(sub(mantissa, 1.0f)));
}

// Return the high 64 bits of a * b. With a uniform 64-bit `a`, this is a uniform integer below b.
SD_HD uint64_t mul_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// --- softmax

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// Convert a log-probability (at most 0) to a weight, and a sum of weights to a float.
SD_HD uint64_t weight_of(float logprob) { return exp2_weight(mul(logprob < 0 ? logprob : 0.0f, kLog2e)); }
SD_HD float sum_of(uint64_t weights) { return static_cast<float>(mul(static_cast<double>(weights), 0x1p-40)); }

// Return x - max for a row's largest entry `max`: 0 at the maximum even if that is +inf, so that entries of +inf share
// all the probability.
SD_HD float below_max(float x, float max) { return x == max ? 0.0f : x - max; }

}  // namespace specdec
