// dequantize: numbers of 8 or 4 bits and their scales as the numbers they stand for.
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "core/floats.h"
#include "layers/gemm/small_m_gemm.h"

namespace specdec::layers {

struct DequantizeParams {
  const void* numbers;  // [rows, width] Float8, or [rows, width / 2] of 4 bits
  const float* scales;  // [groups, rows]; of 4 bits FourBitScale
  void* out;            // [rows, width]
  int64_t rows, width, group_size;
  int64_t numbers_stride, scales_stride, out_stride;  // of rows, in items; of groups
  Dtypes dtype;                                       // of out
  bool in_4_bits, wide;                               // numbers of 8 columns can be read, and out written, at a time
};

// The number of a column, from those of its row and the scale of its group.
SD_HD float widened(const DequantizeParams& p, const void* row, int64_t column, float scale) {
  if (!p.in_4_bits) return to_float(static_cast<const Float8*>(row)[column]) * scale;
  const Nibble at = nibble_of(column, p.width);
  const FourBitScale both(scale);
  const int number = static_cast<const uint8_t*>(row)[at.byte] >> at.shift & 15;
  return static_cast<float>(number - static_cast<int>(both.zero)) * both.scale;
}

void dequantize(CallStream stream, const TensorView& numbers, const TensorView& scales, const TensorView& out);

void dequantize_cpu(const DequantizeParams& p);
void dequantize_cuda(const DequantizeParams& p, Stream stream);

}  // namespace specdec::layers
