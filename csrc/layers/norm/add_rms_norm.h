// add_rms_norm: RMSNorm of x, or of x + residual, whose sum is written as well. Optionally combines MoE expert outputs
// before and quantizes to FP8 after.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

struct AddRmsNormParams {
  const void* x;              // [rows, width]; with topk_weights [rows * top_k, width], combined as by moe_combine
  const float* topk_weights;  // [rows, top_k], or null: top_k is 1
  const void* residual;       // [rows, width] or null
  const void* weight;         // [width]
  void* out_sum;              // [rows, width], or null without a residual
  void* out;                  // [rows, width], Float8 if there are scales
  float* scales;              // [groups, rows] or null; a group is a whole row or kFp8Group elements
  int64_t rows, top_k, width, groups;
  int64_t x_stride, residual_stride, sum_stride, out_stride;  // between rows, in elements
  int64_t scales_stride;                                      // between groups
  float eps;
  Dtypes dtype;
  bool vectorized;  // all rows allow 16-byte accesses
};

void add_rms_norm(CallStream stream, const TensorView& x, const TensorView& weight, double eps,
                  const OptTensor& topk_weights, const OptTensor& residual, const OptTensor& out_sum,
                  const OptTensor& out_scales, const TensorView& out);

void add_rms_norm_cpu(const AddRmsNormParams& p);
void add_rms_norm_cuda(const AddRmsNormParams& p, Stream stream);

}  // namespace specdec::layers
