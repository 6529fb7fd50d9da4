// linear_rows: rows times a weight; a few of them at the speed at which the weight can be read.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"
#include "layers/linear_plan.h"

namespace specdec::layers {

constexpr int64_t kMaxLinearRows = 1 << 18;
constexpr int64_t kLinearGroup = 128;

struct LinearRowsParams {
  const void* x;       // [rows, in]
  const void* weight;  // [out, in]; gated: [2 * out, in], of which the first half are gates
  const void* bias;    // of as many rows, or null
  void* y;             // [rows, out]
  int64_t rows, in, out;
  int64_t x_stride, weight_stride, y_stride;  // of rows, in items
  Dtypes dtype;                               // of bias and y, and of x and weight unless they have scales
  // Of float8_e4m3fn numbers, or null: [groups, rows] and [groups, rows of the weight], one group of a whole row or one
  // of each kLinearGroup numbers.
  const float *x_scales, *weight_scales;
  int64_t groups, x_scales_stride, weight_scales_stride;
  bool gated;       // y is silu(gate) * up; out is a multiple of 8
  LinearPlan plan;  // the kernel, on a GPU
};

void linear_rows(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias,
                 const OptTensor& x_scales, const OptTensor& weight_scales, bool gated,
                 const std::optional<std::string>& plan, const TensorView& out);

// Who is quickest for such tensors (linear_plan.h): x [..., in], weight [out, in], of 8 bits or of x's.
std::string linear_rows_plan(const TensorView& x, const TensorView& weight, bool gated);

void linear_rows_cpu(const LinearRowsParams& p);
void linear_rows_cuda(const LinearRowsParams& p, Stream stream);
void wgmma_linear_rows(const LinearRowsParams& p, Stream stream);

}  // namespace specdec::layers
