// Storage types for FP16, BF16 and FP8, with conversions for host and device, and dispatch from a dtype to its type.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

#include "core/check.h"
#include "core/errors.h"
#include "core/host_device.h"

namespace specdec {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8 {  // e4m3fn: 4 exponent and 3 mantissa bits, at most 448, one NaN per sign, no infinity
  uint8_t bits;
};

namespace detail {

inline float float_from_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t bits_from_float(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000 | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest, ties to even.
inline uint16_t float_to_half(float f) {
  const uint32_t u = bits_from_float(f);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000);
  const uint32_t magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds beyond 65504: infinity
  if (magnitude < 0x38800000) {                       // subnormal in half
    const float scaled = std::fabs(f) * 16777216.0f;  // in units of 2^-24, exact
    return sign | static_cast<uint16_t>(std::nearbyint(scaled));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}

inline float bfloat16_to_float(uint16_t b) { return float_from_bits(static_cast<uint32_t>(b) << 16); }

inline uint16_t float_to_bfloat16(float f) {
  const uint32_t u = bits_from_float(f);
  if ((u & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Branch-free, with selection by masks, so that loops over it vectorize on any x86-64.
inline float float8_to_float(uint8_t b) {
  const uint32_t magnitude = b & 0x7f, bits = magnitude << 20;
  const uint32_t normal = bits + (120u << 23);
  const uint32_t subnormal = bits_from_float(float_from_bits(bits + (121u << 23)) - 0x1p-6f);
  const uint32_t is_subnormal = 0u - static_cast<uint32_t>(static_cast<int>(magnitude) < 8);
  const uint32_t is_nan = 0u - static_cast<uint32_t>(magnitude == 0x7f);
  return float_from_bits(static_cast<uint32_t>(b & 0x80) << 24 | (subnormal & is_subnormal) | (normal & ~is_subnormal) |
                         (0x7fc00000 & is_nan));
}

// Round to nearest, ties to even; saturates at 448, infinity included.
inline uint8_t float_to_float8(float f) {
  const uint32_t u = bits_from_float(f), magnitude = u & 0x7fffffff;
  const auto sign = static_cast<uint8_t>(u >> 24 & 0x80);
  if (magnitude > 0x7f800000) return sign | 0x7f;   // NaN
  if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448
  if (magnitude < 0x3c800000)                       // below 2^-6: subnormal, in units of 2^-9, exact
    return sign | static_cast<uint8_t>(std::nearbyint(std::fabs(f) * 512.0f));
  const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
  return sign | static_cast<uint8_t>((rounded - (120u << 23)) >> 20);
}

}  // namespace detail

SD_HD float to_float(float x) { return x; }
SD_HD float to_float(Half x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  return detail::half_to_float(x.bits);
#endif
}
SD_HD float to_float(BFloat16 x) {
#ifdef __CUDA_ARCH__
  return __bfloat162float(__ushort_as_bfloat16(x.bits));
#else
  return detail::bfloat16_to_float(x.bits);
#endif
}

SD_HD float to_float(Float8 x) {
#ifdef __CUDA_ARCH__
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
#else
  return detail::float8_to_float(x.bits);
#endif
}

template <class T>
SD_HD T from_float(float x);
template <>
SD_HD float from_float<float>(float x) {
  return x;
}
template <>
SD_HD Half from_float<Half>(float x) {
#ifdef __CUDA_ARCH__
  return {__half_as_ushort(__float2half_rn(x))};
#else
  return {detail::float_to_half(x)};
#endif
}
template <>
SD_HD BFloat16 from_float<BFloat16>(float x) {
#ifdef __CUDA_ARCH__
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  return {detail::float_to_bfloat16(x)};
#endif
}
template <>
SD_HD Float8 from_float<Float8>(float x) {
#ifdef __CUDA_ARCH__
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
#else
  return {detail::float_to_float8(x)};
#endif
}

// Call f.template operator()<T>() with the storage type of a checked dtype.
template <class F>
void with_float_type(Dtypes dtype, F&& f) {
#ifndef SPECDEC_COMPILE_CHECK  // which compiles one instantiation of each kernel
  if (dtype == kFloat32) return f.template operator()<float>();
  if (dtype == kFloat16) return f.template operator()<Half>();
#endif
  if (dtype == kBFloat16) return f.template operator()<BFloat16>();
  throw ValueError("internal: not a float dtype");
}

}  // namespace specdec
