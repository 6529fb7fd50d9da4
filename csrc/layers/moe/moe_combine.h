// moe_combine: the sum of each row's expert outputs, weighted by its routing weights.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

struct MoeCombineParams {
  const void* expert_outputs;  // [rows * top_k, width]; the top_k outputs of a row are consecutive
  const float* topk_weights;   // [rows, top_k]
  void* out;                   // [rows, width]
  int64_t rows, top_k, width;
  int64_t expert_outputs_stride, out_stride;  // between rows, in elements
  Dtypes dtype;
  bool vectorized;  // all rows allow 16-byte accesses
};

void moe_combine(CallStream stream, const TensorView& expert_outputs, const TensorView& topk_weights,
                 const TensorView& out);

void moe_combine_cpu(const MoeCombineParams& p);
void moe_combine_cuda(const MoeCombineParams& p, Stream stream);

}  // namespace specdec::layers
