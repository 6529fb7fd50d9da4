#include "layers/quant/dequantize.h"

#include "core/bytes.h"

namespace specdec::layers {

void dequantize(CallStream stream, const TensorView& qweight, const TensorView& scales, const TensorView& out) {
  Check check("dequantize");
  Dim N{"rows"}, B{"bytes"}, G{"groups"}, K{"width"};
  check.strided("qweight", qweight, {N, B}, kFloat8 | kUInt8);
  const bool is_int4 = dtype_of(qweight) == kUInt8;
  check.range("bytes", B, 1, INT32_MAX / 2);
  K.value = is_int4 ? 2 * B : B.value;
  check.strided("scales", scales, {G, N}, kFloat32);
  const int64_t all = (K + kWeightGroup - 1) / kWeightGroup;
  if (is_int4)
    check.that(G > 0 && K % std::max<int64_t>(G, 1) == 0, "groups", {"is ", G}, {"a divisor of ", K});
  else
    check.that(G == 1 || G == all, "groups", {"is ", G}, {"1 or ", all});
  check.strided_output("out", out, {N, K}, kFloats);
  if (N == 0) return;

  const DequantizeParams params{
      .qweight = qweight.data<void>(),
      .scales = scales.data<float>(),
      .out = out.data<void>(),
      .rows = N,
      .width = K,
      .group_size = G == 1    ? K.value
                    : is_int4 ? K / G
                              : kWeightGroup,
      .qweight_stride = qweight.stride(0),
      .scales_stride = scales.stride(0),
      .out_stride = out.stride(0),
      .dtype = dtype_of(out),
      .is_int4 = is_int4,
      .vectorized = K % 8 == 0 && copy_unit({&qweight}) >= (is_int4 ? 4 : 8) && copy_unit({&out}) == 16,
  };
  SD_DISPATCH(check, stream, dequantize, params);
}

void dequantize_cpu(const DequantizeParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row) {
      const auto* qweight = static_cast<const uint8_t*>(p.qweight) + row * p.qweight_stride;
      T* const out = static_cast<T*>(p.out) + row * p.out_stride;
      for (int64_t k = 0; k < p.width; ++k)
        out[k] = from_float<T>(dequantized(p, qweight, k, p.scales[k / p.group_size * p.scales_stride + row]));
    }
  });
}

}  // namespace specdec::layers
