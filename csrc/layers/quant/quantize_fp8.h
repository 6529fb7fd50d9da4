// quantize_fp8: rows as numbers of 8 bits and their scales.
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

constexpr int64_t kRoundGroup = 128;                            // neighbouring numbers of a row that share a scale
constexpr float kLargestFloat8 = 448, kSmallestScale = 1e-12f;  // the second of numbers that are all 0

struct QuantizeFp8Params {
  const void* x;                                    // [rows, width]
  const float* given;                               // the scale of all, or null
  Float8* numbers;                                  // [rows, width]
  float* scales;                                    // [groups, rows]
  int64_t rows, width, groups;                      // one group of whole rows, or one of each 128 numbers
  int64_t x_stride, numbers_stride, scales_stride;  // of rows, in items; of groups
  Dtypes dtype;
  bool wide;  // four numbers can be read and written at a time
};

// The scale of numbers of which the largest is known.
SD_HD float scale_of(float largest) {
  const float scale = largest / kLargestFloat8;
  return scale > kSmallestScale ? scale : kSmallestScale;
}
SD_HD Float8 scaled(float x, float scale) { return from_float<Float8>(x / scale); }

void quantize_fp8(CallStream stream, const TensorView& x, std::optional<int64_t> group_size, const OptTensor& scale,
                  const TensorView& out, const TensorView& out_scales);

void quantize_fp8_cpu(const QuantizeFp8Params& p);
void quantize_fp8_cuda(const QuantizeFp8Params& p, Stream stream);

}  // namespace specdec::layers
