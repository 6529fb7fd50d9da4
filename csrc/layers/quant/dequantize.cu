// Dequantize FP8 or INT4 weights: out = q * scale, or (q - zero) * scale.
//
// One thread per eight adjacent elements. Eight INT4 elements of an interleaved row lie in four words of a cache line
// that adjacent threads read as well.
#include "core/cuda.cuh"
#include "core/pack.cuh"
#include "layers/quant/dequantize.h"

namespace specdec::layers {
namespace {

constexpr int kThreads = 256, kPack = 8;

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(DequantizeParams p) {
  begin_kernel();
  const int64_t packs = (p.width + kPack - 1) / kPack;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.rows * packs) return;
  const int64_t row = i / packs, first = i % packs * kPack;
  const auto* const qweight = static_cast<const uint8_t*>(p.qweight) + row * p.qweight_stride;
  T* const out = static_cast<T*>(p.out) + row * p.out_stride + first;
  const auto scale_at = [&](int64_t column) { return p.scales[column / p.group_size * p.scales_stride + row]; };

  if (!p.vectorized || p.group_size % kPack != 0) {
    for (int n = 0; n < kPack && first + n < p.width; ++n)
      out[n] = from_float<T>(dequantized(p, qweight, first + n, scale_at(first + n)));
    return;
  }
  const float scale = scale_at(first);
  float values[kPack];
  if (!p.is_int4) {
    const auto pack = reinterpret_cast<const Pack<Float8, kPack>*>(qweight)[first / kPack];
    unpack(pack, values);
#pragma unroll
    for (float& value : values) value *= scale;
  } else {
    const Int4Scale both(scale);
    const auto value_of = [&](uint32_t bits) {
      return static_cast<float>(static_cast<int>(bits & 15) - static_cast<int>(both.zero)) * both.scale;
    };
    if (p.width % kInterleavedColumns == 0) {
      const Int4Place at = int4_place(first, p.width);
#pragma unroll
      for (int n = 0; n < kPack; n += 2) {  // the next column is 16 bits higher
        const uint32_t word = *reinterpret_cast<const uint32_t*>(qweight + (at.byte / 4 * 4 + n / 2 * 16));
        const int shift = static_cast<int>(at.byte % 4) * 8 + at.shift;
        values[n] = value_of(word >> shift);
        values[n + 1] = value_of(word >> (shift + 16));
      }
    } else {
      const uint32_t word = reinterpret_cast<const uint32_t*>(qweight)[first / kPack];
#pragma unroll
      for (int n = 0; n < kPack; ++n) values[n] = value_of(word >> 4 * n);
    }
  }
  constexpr int kAtOnce = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int n = 0; n < kPack; n += kAtOnce) {
    float part[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) part[e] = values[n + e];
    reinterpret_cast<Pack<T, kAtOnce>*>(out)[n / kAtOnce] = pack_of<T>(part);
  }
}

}  // namespace

void dequantize_cuda(const DequantizeParams& p, Stream stream) {
  const int64_t packs = p.rows * ((p.width + kPack - 1) / kPack);
  with_float_type(p.dtype, [&]<class T>() {
    launch("dequantize", dequantize_kernel<T>,
           {.grid = grid_x("dequantize", (packs + kThreads - 1) / kThreads), .threads = kThreads}, stream, p);
  });
}

}  // namespace specdec::layers
