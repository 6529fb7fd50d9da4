// linear_rows: a few rows times a weight, at the speed at which the weight can be read.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec {

constexpr int64_t kMaxLinearRows = 64;

struct LinearRowsParams {
  const void* x;       // [rows, in]
  const void* weight;  // [out, in]
  const void* bias;    // [out] or null
  void* y;             // [rows, out]
  int64_t rows, in, out;
  int64_t x_stride, weight_stride, y_stride;  // of rows, in items
  Dtypes dtype;
};

void linear_rows(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias,
                 const TensorView& out);

void linear_rows_cpu(const LinearRowsParams& p);
void linear_rows_cuda(const LinearRowsParams& p, Stream stream);
void wgmma_linear_rows(const LinearRowsParams& p, Stream stream);  // where the device has wgmma

}  // namespace specdec
