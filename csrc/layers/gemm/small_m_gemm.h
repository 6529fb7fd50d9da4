// small_m_gemm: GEMM for small M (1 to 128 rows), y = x weight^T, bound by the bandwidth that reads the weight. Weights
// are 16-bit, FP8 or INT4; bias and silu_and_mul may be fused.
#pragma once

#include <bit>

#include "core/dispatch.h"
#include "core/floats.h"
#include "layers/gemm/small_m_gemm_plan.h"

namespace specdec::layers {

constexpr int64_t kMaxSmallMRows = 1 << 18;
constexpr int64_t kWeightGroup = 128;  // elements of a weight row that share a scale

// Where an INT4 element (0 to 15) is stored. If the row's width is a multiple of 256, every 256 elements are
// interleaved for the tensor cores in 128 bytes: per half of the 256, each of four threads (by column / 2 % 4) owns 16
// contiguous bytes, i.e. four words, each with that thread's eight of 32 columns; nibbles i and i + 4 of a word are
// adjacent columns. Rows of other widths pack adjacent columns into a byte, the first in its lower half; small_m_gemm
// does not accept those.
constexpr int64_t kInterleavedColumns = 2 * kWeightGroup;
struct Int4Place {
  int64_t byte;
  int shift;
};
SD_HD Int4Place int4_place(int64_t column, int64_t width) {
  if (width % kInterleavedColumns != 0) return {column / 2, static_cast<int>(column % 2) * 4};
  const int at = static_cast<int>(column % 256), step = at / 16, pair = step % 2 * 2 + at % 16 / 8;
  const int word = (step / 8 * 4 + at % 8 / 2) * 4 + step % 8 / 2, nibble = pair + at % 2 * 4;
  return {column / 256 * 128 + word * 4 + nibble / 2, nibble % 2 * 4};
}

// A float32 scale whose four lowest bits hold the zero point.
struct Int4Scale {
  float scale;
  uint32_t zero;

  SD_HD explicit Int4Scale(float both)
      : scale(std::bit_cast<float>(std::bit_cast<uint32_t>(both) & ~15u)), zero(std::bit_cast<uint32_t>(both) & 15) {}
};

struct SmallMGemmParams {
  const void* x;       // [rows, in]
  const void* weight;  // [out, in]; gated: [2 * out, in], gate rows first, then up rows
  const void* bias;    // [weight rows] or null
  void* y;             // [rows, out]
  int64_t rows, in, out;
  int64_t x_stride, weight_stride, y_stride;  // between rows, in elements
  Dtypes dtype;                               // of bias and y, and of x and weight unless they have scales
  bool float32_y;                             // y is float32, whatever dtype is
  int bits;                                   // per weight element: 16, 8 or 4
  // Each may be null. x_scales: [groups, rows] of FP8 x. weight_scales: [groups, weight rows] of an FP8 or INT4 weight;
  // an INT4 weight's are Int4Scale. A group is a whole row or kWeightGroup elements.
  const float *x_scales, *weight_scales;
  int64_t groups, x_scales_stride, weight_scales_stride;
  bool gated;     // y is silu(gate) * up; out is a multiple of 8
  GemmPlan plan;  // the kernel, on a GPU

  // Return a row of y.
  SD_HD void* y_row(int64_t row) const {
    return static_cast<char*>(y) + row * y_stride * static_cast<int64_t>(float32_y ? sizeof(float) : 2);
  }
  // Write an element of a row of y, of T unless that is float32.
  template <class T>
  SD_HD void put(void* row, int64_t at, float value) const {
    if (float32_y)
      static_cast<float*>(row)[at] = value;
    else
      static_cast<T*>(row)[at] = from_float<T>(value);
  }
};

void small_m_gemm(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias,
                  const OptTensor& x_scales, const OptTensor& weight_scales, bool gated,
                  const std::optional<std::string>& plan, const TensorView& out);

// Return the name of the fastest implementation (small_m_gemm_plan.h) for x [..., in] and weight [out, in] of x's
// dtype, FP8 or INT4.
std::string small_m_gemm_plan(const TensorView& x, const TensorView& weight, bool gated);

void small_m_gemm_cpu(const SmallMGemmParams& p);
void small_m_gemm_cuda(const SmallMGemmParams& p, Stream stream);
void wgmma_small_m_gemm(const SmallMGemmParams& p, Stream stream);

}  // namespace specdec::layers
