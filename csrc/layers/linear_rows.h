// linear_rows: rows times a weight; a few of them at the speed at which the weight can be read.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec {

constexpr int64_t kMaxLinearRows = 1 << 18;
constexpr int64_t kFewLinearRows = 128;  // beyond, arithmetic counts

struct LinearRowsParams {
  const void* x;       // [rows, in]
  const void* weight;  // [out, in]; gated: [2 * out, in], of which the first half are gates
  const void* bias;    // of as many rows, or null
  void* y;             // [rows, out]
  int64_t rows, in, out;
  int64_t x_stride, weight_stride, y_stride;  // of rows, in items
  Dtypes dtype;
  bool gated;  // y is silu(gate) * up; out is a multiple of 8
};

void linear_rows(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias, bool gated,
                 const TensorView& out);

void linear_rows_cpu(const LinearRowsParams& p);
void linear_rows_cuda(const LinearRowsParams& p, Stream stream);
// Where the device has wgmma.
void wgmma_linear_rows(const LinearRowsParams& p, Stream stream);
void wgmma_many_rows(const LinearRowsParams& p, Stream stream);

// Whether the CUDA device that is current has it, and this build its instructions.
bool has_wgmma();
// Whether so many more than kFewLinearRows rows, by a weight of so many, keep nine tenths of such a device busy.
bool many_rows_fill(int64_t rows, int64_t weight_rows);

}  // namespace specdec
