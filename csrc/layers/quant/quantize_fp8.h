// quantize_fp8: dynamic FP8 (e4m3) quantization of activations, per row or per group of 128 elements; or with a given
// static scale.
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

constexpr int64_t kFp8Group = 128;                     // adjacent elements of a row that share a scale
constexpr float kMaxFloat8 = 448, kMinScale = 1e-12f;  // kMinScale: of groups that are all 0

struct QuantizeFp8Params {
  const void* x;                                // [rows, width]
  const float* scale_in;                        // [1], a static scale, or null
  Float8* out;                                  // [rows, width]
  float* scales;                                // [groups, rows]
  int64_t rows, width, groups;                  // groups per row: 1, or one per kFp8Group elements
  int64_t x_stride, out_stride, scales_stride;  // between rows, in elements; scales_stride between groups
  Dtypes dtype;
  bool vectorized;  // four elements can be read and written at once
};

// Return the scale of elements whose largest magnitude is `max`.
SD_HD float fp8_scale(float max) {
  const float scale = max / kMaxFloat8;
  return scale > kMinScale ? scale : kMinScale;
}
SD_HD Float8 to_fp8(float x, float scale) { return from_float<Float8>(x / scale); }

void quantize_fp8(CallStream stream, const TensorView& x, std::optional<int64_t> group_size, const OptTensor& scale,
                  const TensorView& out, const TensorView& out_scales);

void quantize_fp8_cpu(const QuantizeFp8Params& p);
void quantize_fp8_cuda(const QuantizeFp8Params& p, Stream stream);

}  // namespace specdec::layers
