#include "layers/norm_rows.h"

#include "core/bytes.h"
#include "layers/norm_row.h"

namespace specdec::layers {

void norm_rows(CallStream stream, const TensorView& x, const TensorView& weight, double eps, const OptTensor& residual,
               const OptTensor& out_sum, const TensorView& out) {
  Check check("norm_rows");
  Dim T{"rows"}, H{"width"};
  check.strided("x", x, {T, H}, kFloats);
  const Dtypes dtype = dtype_of(x);
  check.range("width", H, 1, INT32_MAX);
  check.tensor("weight", weight, {H}, dtype);
  const float epsilon = check.factor("eps", eps);
  check.that(residual.has_value() == out_sum.has_value(), "out[1]", out_sum ? "is given" : "is None",
             residual ? "a tensor beside residual" : "None without residual");
  if (residual) {
    check.strided("residual", *residual, {T, H}, dtype);
    check.strided_output("out[1]", *out_sum, {T, H}, dtype);
  }
  check.strided_output("out[0]", out, {T, H}, dtype);
  if (T == 0) return;

  bool wide = copy_unit({&x, &weight, &out}) == 16;
  if (residual) wide = wide && copy_unit({&*residual, &*out_sum}) == 16;
  const NormRowsParams params{
      .x = x.data<void>(),
      .residual = data_or_null<void>(residual),
      .weight = weight.data<void>(),
      .out_sum = data_or_null<void>(out_sum),
      .out = out.data<void>(),
      .rows = T,
      .width = H,
      .x_stride = x.stride(0),
      .residual_stride = residual ? residual->stride(0) : 0,
      .sum_stride = out_sum ? out_sum->stride(0) : 0,
      .out_stride = out.stride(0),
      .eps = epsilon,
      .dtype = dtype,
      .wide = wide,
  };
  SD_DISPATCH(check, stream, norm_rows, params);
}

void norm_rows_cpu(const NormRowsParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    const auto* weight = static_cast<const T*>(p.weight);
    for (int64_t row = 0; row < p.rows; ++row) {
      const auto* x = static_cast<const T*>(p.x) + row * p.x_stride;
      if (p.residual) {
        const auto* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
        auto* sum = static_cast<T*>(p.out_sum) + row * p.sum_stride;
        for (int64_t i = 0; i < p.width; ++i) sum[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
        x = sum;
      }
      norm_row_cpu(x, weight, p.width, p.eps, static_cast<T*>(p.out) + row * p.out_stride);
    }
  });
}

}  // namespace specdec::layers
