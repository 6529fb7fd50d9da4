// combine_rows: what a row's experts made of it, as one sum by their shares.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

struct CombineRowsParams {
  const void* made;     // [rows * taken, width], those of a row one behind another
  const float* shares;  // [rows, taken]
  void* out;            // [rows, width]
  int64_t rows, taken, width;
  int64_t made_stride, out_stride;  // of rows, in items
  Dtypes dtype;
  bool wide;  // everything can be read and written 16 bytes at a time
};

void combine_rows(CallStream stream, const TensorView& made, const TensorView& shares, const TensorView& out);

void combine_rows_cpu(const CombineRowsParams& p);
void combine_rows_cuda(const CombineRowsParams& p, Stream stream);

}  // namespace specdec::layers
