#include "layers/norm/add_rms_norm.h"

#include <vector>

#include "core/bytes.h"
#include "layers/moe/moe_combine.h"
#include "layers/norm/rms_norm_row.h"
#include "layers/quant/quantize_fp8.h"

namespace specdec::layers {

void add_rms_norm(CallStream stream, const TensorView& x, const TensorView& weight, double eps, const OptTensor& shares,
                  const OptTensor& residual, const OptTensor& out_sum, const OptTensor& out_scales,
                  const TensorView& out) {
  Check check("add_rms_norm");
  Dim T{"rows"}, H{"width"};
  Dim J{"taken", 1};
  if (shares) {
    J = Dim{"taken"};
    check.tensor("shares", *shares, {T, J}, kFloat32);
    check.range("taken", J, 1, INT32_MAX);
    Dim M{"rows * taken", T * J};
    check.strided("x", x, {M, H}, kFloats);
  } else {
    check.strided("x", x, {T, H}, kFloats);
  }
  const Dtypes dtype = dtype_of(x);
  check.range("width", H, 1, INT32_MAX);
  check.tensor("weight", weight, {H}, dtype);
  check.that(!shares || residual, "shares", "is given", "None without residual");
  const float epsilon = check.factor("eps", eps);
  check.that(residual.has_value() == out_sum.has_value(), "out[1]", out_sum ? "is given" : "is None",
             residual ? "a tensor beside residual" : "None without residual");
  if (residual) {
    check.strided("residual", *residual, {T, H}, dtype);
    check.strided_output("out[1]", *out_sum, {T, H}, dtype);
  }
  const bool rounded = out_scales.has_value();
  check.strided_output("out[0]", out, {T, H}, rounded ? kFloat8 : dtype);
  bool wide = copy_unit({&x, &weight}) == 16 && copy_unit({&out}) >= (rounded ? 16 / item_bytes(x) : 16);
  if (residual) wide = wide && copy_unit({&*residual, &*out_sum}) == 16;
  Dim G{"groups"};
  if (rounded) {
    check.strided_output("out_scales", *out_scales, {G, T}, kFloat32);
    const int64_t groups = (H + kRoundGroup - 1) / kRoundGroup;
    check.that(G == 1 || G == groups, "groups", {"is ", G}, {"1 or ", groups});
    check.that(wide || !check.on_cuda(), "out_scales", "is given", "None for rows off 16 bytes");
  }
  if (T == 0) return;

  const AddRmsNormParams params{
      .x = x.data<void>(),
      .shares = data_or_null<float>(shares),
      .residual = data_or_null<void>(residual),
      .weight = weight.data<void>(),
      .out_sum = data_or_null<void>(out_sum),
      .out = out.data<void>(),
      .scales = data_or_null<float>(out_scales),
      .rows = T,
      .taken = J,
      .width = H,
      .groups = rounded ? G.value : 0,
      .x_stride = x.stride(0),
      .residual_stride = residual ? residual->stride(0) : 0,
      .sum_stride = out_sum ? out_sum->stride(0) : 0,
      .out_stride = out.stride(0),
      .scales_stride = rounded ? out_scales->stride(0) : 0,
      .eps = epsilon,
      .dtype = dtype,
      .wide = wide,
  };
  SD_DISPATCH(check, stream, add_rms_norm, params);
}

void add_rms_norm_cpu(const AddRmsNormParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    const auto* weight = static_cast<const T*>(p.weight);
    std::vector<T> normed(static_cast<size_t>(p.scales ? p.width : 0));
    std::vector<T> combined(static_cast<size_t>(p.shares ? p.width : 0));
    for (int64_t row = 0; row < p.rows; ++row) {
      const auto* x = static_cast<const T*>(p.x) + row * p.x_stride;
      if (p.shares) {
        moe_combine_cpu({.made = static_cast<const T*>(p.x) + row * p.taken * p.x_stride,
                         .shares = p.shares + row * p.taken,
                         .out = combined.data(),
                         .rows = 1,
                         .taken = p.taken,
                         .width = p.width,
                         .made_stride = p.x_stride,
                         .out_stride = 0,
                         .dtype = p.dtype,
                         .wide = false});
        x = combined.data();
      }
      if (p.residual) {
        const auto* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
        auto* sum = static_cast<T*>(p.out_sum) + row * p.sum_stride;
        for (int64_t i = 0; i < p.width; ++i) sum[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
        x = sum;
      }
      if (p.scales == nullptr) {
        norm_row_cpu(x, weight, p.width, p.eps, static_cast<T*>(p.out) + row * p.out_stride);
        continue;
      }
      norm_row_cpu(x, weight, p.width, p.eps, normed.data());
      quantize_fp8_cpu({.x = normed.data(),
                        .given = nullptr,
                        .numbers = static_cast<Float8*>(p.out) + row * p.out_stride,
                        .scales = p.scales + row,
                        .rows = 1,
                        .width = p.width,
                        .groups = p.groups,
                        .x_stride = 0,
                        .numbers_stride = 0,
                        .scales_stride = p.scales_stride,
                        .dtype = p.dtype,
                        .wide = false});
    }
  });
}

}  // namespace specdec::layers
