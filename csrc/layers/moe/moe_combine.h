// moe_combine: what a row's experts made of it, as one sum by their shares.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

struct MoeCombineParams {
  const void* made;     // [rows * taken, width], those of a row one behind another
  const float* shares;  // [rows, taken]
  void* out;            // [rows, width]
  int64_t rows, taken, width;
  int64_t made_stride, out_stride;  // of rows, in items
  Dtypes dtype;
  bool wide;  // everything can be read and written 16 bytes at a time
};

void moe_combine(CallStream stream, const TensorView& made, const TensorView& shares, const TensorView& out);

void moe_combine_cpu(const MoeCombineParams& p);
void moe_combine_cuda(const MoeCombineParams& p, Stream stream);

}  // namespace specdec::layers
