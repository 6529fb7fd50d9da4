// add_rms_norm: each row over its root mean square, of x or of x + residual, whose sum is kept as well.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

struct AddRmsNormParams {
  const void* x;         // [rows, width]; with shares [rows * taken, width], of which moe_combine makes that
  const float* shares;   // [rows, taken] or null, then `taken` is 1
  const void* residual;  // [rows, width] or null
  const void* weight;    // [width]
  void* out_sum;         // [rows, width], or null without a residual
  void* out;             // [rows, width], of Float8 with scales
  float* scales;         // [groups, rows] or null; one group of whole rows, or one of each kRoundGroup numbers
  int64_t rows, taken, width, groups;
  int64_t x_stride, residual_stride, sum_stride, out_stride;  // of rows, in items
  int64_t scales_stride;                                      // of groups
  float eps;
  Dtypes dtype;
  bool wide;  // everything can be read and written 16 bytes at a time
};

void add_rms_norm(CallStream stream, const TensorView& x, const TensorView& weight, double eps, const OptTensor& shares,
                  const OptTensor& residual, const OptTensor& out_sum, const OptTensor& out_scales,
                  const TensorView& out);

void add_rms_norm_cpu(const AddRmsNormParams& p);
void add_rms_norm_cuda(const AddRmsNormParams& p, Stream stream);

}  // namespace specdec::layers
