#include "layers/norm/add_rms_norm.h"

#include <vector>

#include "core/bytes.h"
#include "layers/moe/moe_combine.h"
#include "layers/norm/rms_norm_row.h"
#include "layers/quant/quantize_fp8.h"

namespace specdec::layers {

void add_rms_norm(CallStream stream, const TensorView& x, const TensorView& weight, double eps,
                  const OptTensor& topk_weights, const OptTensor& residual, const OptTensor& out_sum,
                  const OptTensor& out_scales, const TensorView& out) {
  Check check("add_rms_norm");
  Dim T{"rows"}, H{"width"};
  Dim J{"top_k", 1};
  if (topk_weights) {
    J = Dim{"top_k"};
    check.tensor("topk_weights", *topk_weights, {T, J}, kFloat32);
    check.range("top_k", J, 1, INT32_MAX);
    Dim M{"rows * top_k", T * J};
    check.strided("x", x, {M, H}, kFloats);
  } else {
    check.strided("x", x, {T, H}, kFloats);
  }
  const Dtypes dtype = dtype_of(x);
  check.range("width", H, 1, INT32_MAX);
  check.tensor("weight", weight, {H}, dtype);
  check.that(!topk_weights || residual, "topk_weights", "is given", "None without residual");
  const float epsilon = check.factor("eps", eps);
  check.that(residual.has_value() == out_sum.has_value(), "out[1]", out_sum ? "is given" : "is None",
             residual ? "a tensor with residual" : "None without residual");
  if (residual) {
    check.strided("residual", *residual, {T, H}, dtype);
    check.strided_output("out[1]", *out_sum, {T, H}, dtype);
  }
  const bool quantized = out_scales.has_value();
  check.strided_output("out[0]", out, {T, H}, quantized ? kFloat8 : dtype);
  bool vectorized = copy_unit({&x, &weight}) == 16 && copy_unit({&out}) >= (quantized ? 16 / item_bytes(x) : 16);
  if (residual) vectorized = vectorized && copy_unit({&*residual, &*out_sum}) == 16;
  Dim G{"groups"};
  if (quantized) {
    check.strided_output("out_scales", *out_scales, {G, T}, kFloat32);
    const int64_t groups = (H + kFp8Group - 1) / kFp8Group;
    check.that(G == 1 || G == groups, "groups", {"is ", G}, {"1 or ", groups});
    check.that(vectorized || !check.on_cuda(), "out_scales", "is given", "None for rows off 16 bytes");
  }
  if (T == 0) return;

  const AddRmsNormParams params{
      .x = x.data<void>(),
      .topk_weights = data_or_null<float>(topk_weights),
      .residual = data_or_null<void>(residual),
      .weight = weight.data<void>(),
      .out_sum = data_or_null<void>(out_sum),
      .out = out.data<void>(),
      .scales = data_or_null<float>(out_scales),
      .rows = T,
      .top_k = J,
      .width = H,
      .groups = quantized ? G.value : 0,
      .x_stride = x.stride(0),
      .residual_stride = residual ? residual->stride(0) : 0,
      .sum_stride = out_sum ? out_sum->stride(0) : 0,
      .out_stride = out.stride(0),
      .scales_stride = quantized ? out_scales->stride(0) : 0,
      .eps = epsilon,
      .dtype = dtype,
      .vectorized = vectorized,
  };
  SD_DISPATCH(check, stream, add_rms_norm, params);
}

void add_rms_norm_cpu(const AddRmsNormParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    const auto* weight = static_cast<const T*>(p.weight);
    std::vector<T> normed(static_cast<size_t>(p.scales ? p.width : 0));
    std::vector<T> combined(static_cast<size_t>(p.topk_weights ? p.width : 0));
    for (int64_t row = 0; row < p.rows; ++row) {
      const auto* x = static_cast<const T*>(p.x) + row * p.x_stride;
      if (p.topk_weights) {
        moe_combine_cpu({.expert_outputs = static_cast<const T*>(p.x) + row * p.top_k * p.x_stride,
                         .topk_weights = p.topk_weights + row * p.top_k,
                         .out = combined.data(),
                         .rows = 1,
                         .top_k = p.top_k,
                         .width = p.width,
                         .expert_outputs_stride = p.x_stride,
                         .out_stride = 0,
                         .dtype = p.dtype,
                         .vectorized = false});
        x = combined.data();
      }
      if (p.residual) {
        const auto* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
        auto* sum = static_cast<T*>(p.out_sum) + row * p.sum_stride;
        for (int64_t i = 0; i < p.width; ++i) sum[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
        x = sum;
      }
      if (p.scales == nullptr) {
        rms_norm_row_cpu(x, weight, p.width, p.eps, static_cast<T*>(p.out) + row * p.out_stride);
        continue;
      }
      rms_norm_row_cpu(x, weight, p.width, p.eps, normed.data());
      quantize_fp8_cpu({.x = normed.data(),
                        .scale_in = nullptr,
                        .out = static_cast<Float8*>(p.out) + row * p.out_stride,
                        .scales = p.scales + row,
                        .rows = 1,
                        .width = p.width,
                        .groups = p.groups,
                        .x_stride = 0,
                        .out_stride = 0,
                        .scales_stride = p.scales_stride,
                        .dtype = p.dtype,
                        .vectorized = false});
    }
  });
}

}  // namespace specdec::layers
