#include "layers/quant/quantize_fp8.h"

#include <cmath>

#include "core/bytes.h"

namespace specdec::layers {

void quantize_fp8(CallStream stream, const TensorView& x, std::optional<int64_t> group_size, const OptTensor& scale,
                  const TensorView& out, const TensorView& out_scales) {
  Check check("quantize_fp8");
  Dim T{"rows"}, W{"width"};
  check.strided("x", x, {T, W}, kFloats);
  check.range("width", W, 1, INT32_MAX);
  check.tensor("scale", scale, {1}, kFloat32);
  check.strided_output("out", out, {T, W}, kFloat8);
  check.that(!group_size || *group_size == kFp8Group, "group_size", {"is ", group_size.value_or(0)}, "128 or None");
  check.that(!group_size || !scale, "scale", "is given", "None with a group_size");
  Dim G{"groups", group_size ? (W + kFp8Group - 1) / kFp8Group : 1};
  check.strided_output("out_scales", out_scales, {G, T}, kFloat32);
  if (T == 0) return;

  const QuantizeFp8Params params{
      .x = x.data<void>(),
      .scale_in = data_or_null<float>(scale),
      .out = out.data<Float8>(),
      .scales = out_scales.data<float>(),
      .rows = T,
      .width = W,
      .groups = G,
      .x_stride = x.stride(0),
      .out_stride = out.stride(0),
      .scales_stride = out_scales.stride(0),
      .dtype = dtype_of(x),
      .vectorized = copy_unit({&x}) >= 4 * item_bytes(x) && copy_unit({&out}) >= 4,
  };
  SD_DISPATCH(check, stream, quantize_fp8, params);
}

void quantize_fp8_cpu(const QuantizeFp8Params& p) {
  with_float_type(p.dtype, [&]<class T>() {
    const int64_t size = p.groups == 1 ? p.width : kFp8Group;
    for (int64_t row = 0; row < p.rows; ++row) {
      const auto* x = static_cast<const T*>(p.x) + row * p.x_stride;
      Float8* const out = p.out + row * p.out_stride;
      for (int64_t group = 0; group < p.groups; ++group) {
        const int64_t begin = group * size, end = std::min(begin + size, p.width);
        float max = 0;
        for (int64_t i = begin; i < end; ++i) max = std::fmax(max, std::fabs(to_float(x[i])));
        const float scale = p.scale_in ? std::fmax(*p.scale_in, kMinScale) : fp8_scale(max);
        p.scales[group * p.scales_stride + row] = scale;
        for (int64_t i = begin; i < end; ++i) out[i] = to_fp8(to_float(x[i]), scale);
      }
    }
  });
}

}  // namespace specdec::layers
