// dequantize: FP8 or INT4 weights and their scales to floats.
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "core/floats.h"
#include "layers/gemm/small_m_gemm.h"

namespace specdec::layers {

struct DequantizeParams {
  const void* qweight;  // [rows, width] Float8, or [rows, width / 2] bytes of INT4
  const float* scales;  // [groups, rows]; Int4Scale for INT4
  void* out;            // [rows, width]
  int64_t rows, width, group_size;
  int64_t qweight_stride, scales_stride, out_stride;  // between rows, in elements; scales_stride between groups
  Dtypes dtype;                                       // of out
  bool is_int4;
  bool vectorized;  // 8 columns can be read, and 16 bytes of out written, at once
};

// Return one dequantized element of a row, given its group's scale.
SD_HD float dequantized(const DequantizeParams& p, const void* row, int64_t column, float scale) {
  if (!p.is_int4) return to_float(static_cast<const Float8*>(row)[column]) * scale;
  const Int4Place at = int4_place(column, p.width);
  const Int4Scale both(scale);
  const int q = static_cast<const uint8_t*>(row)[at.byte] >> at.shift & 15;
  return static_cast<float>(q - static_cast<int>(both.zero)) * both.scale;
}

void dequantize(CallStream stream, const TensorView& qweight, const TensorView& scales, const TensorView& out);

void dequantize_cpu(const DequantizeParams& p);
void dequantize_cuda(const DequantizeParams& p, Stream stream);

}  // namespace specdec::layers
