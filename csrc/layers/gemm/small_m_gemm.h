// small_m_gemm: rows times a weight; a few of them at the speed at which the weight can be read.
#pragma once

#include <bit>

#include "core/dispatch.h"
#include "core/floats.h"
#include "layers/gemm/small_m_gemm_plan.h"

namespace specdec::layers {

constexpr int64_t kMaxSmallMGemm = 1 << 18;
constexpr int64_t kLinearGroup = 128;

// A weight of 4 bits: numbers 0 to 15, 256 of a row in 128 bytes, ordered for the tensor cores; rows of other widths
// have neighbours in a byte, the first in its lower half, which small_m_gemm does not take. A thread of four, by
// column / 2 % 4, has the columns of 16 bytes for each half of the 256, in words for 32 of them, whose nibble i
// and i + 4 are neighbours in the row.
constexpr int64_t kOrderedColumns = 2 * kLinearGroup;
struct Nibble {
  int64_t byte;
  int shift;
};
SD_HD Nibble nibble_of(int64_t column, int64_t width) {
  if (width % kOrderedColumns != 0) return {column / 2, static_cast<int>(column % 2) * 4};
  const int at = static_cast<int>(column % 256), step = at / 16, pair = step % 2 * 2 + at % 16 / 8;
  const int word = (step / 8 * 4 + at % 8 / 2) * 4 + step % 8 / 2, nibble = pair + at % 2 * 4;
  return {column / 256 * 128 + word * 4 + nibble / 2, nibble % 2 * 4};
}

// A scale whose four lowest bits are the number that stands for 0.
struct FourBitScale {
  float scale;
  uint32_t zero;

  SD_HD explicit FourBitScale(float both)
      : scale(std::bit_cast<float>(std::bit_cast<uint32_t>(both) & ~15u)), zero(std::bit_cast<uint32_t>(both) & 15) {}
};

struct SmallMGemmParams {
  const void* x;       // [rows, in]
  const void* weight;  // [out, in]; gated: [2 * out, in], of which the first half are gates
  const void* bias;    // of as many rows, or null
  void* y;             // [rows, out]
  int64_t rows, in, out;
  int64_t x_stride, weight_stride, y_stride;  // of rows, in items
  Dtypes dtype;                               // of bias and y, and of x and weight unless they have scales
  int bits;                                   // of a number of the weight
  // Or null: [groups, rows] of float8_e4m3fn x, and [groups, rows of the weight] where the weight has 8 bits or 4; one
  // group of a whole row or one of each kLinearGroup numbers. Of 4 bits they are FourBitScale.
  const float *x_scales, *weight_scales;
  int64_t groups, x_scales_stride, weight_scales_stride;
  bool gated;       // y is silu(gate) * up; out is a multiple of 8
  LinearPlan plan;  // the kernel, on a GPU
};

void small_m_gemm(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias,
                  const OptTensor& x_scales, const OptTensor& weight_scales, bool gated,
                  const std::optional<std::string>& plan, const TensorView& out);

// Who is quickest for such tensors (small_m_gemm_plan.h): x [..., in], weight [out, in], of x's dtype, 8 bits
// or 4.
std::string small_m_gemm_plan(const TensorView& x, const TensorView& weight, bool gated);

void small_m_gemm_cpu(const SmallMGemmParams& p);
void small_m_gemm_cuda(const SmallMGemmParams& p, Stream stream);
void wgmma_small_m_gemm(const SmallMGemmParams& p, Stream stream);

}  // namespace specdec::layers
