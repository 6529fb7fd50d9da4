#include "layers/linear_rows.h"

#include <algorithm>

#include "core/bytes.h"
#include "layers/gate_rows.h"

namespace specdec::layers {
namespace {

LinearShape shape_of(const TensorView& x, const TensorView& weight, bool gated) {
  const int64_t ins = weight.shape(1), rows = x.numel() / std::max<int64_t>(ins, 1);
  const bool one_row = x.ndim() == 1 || x.shape(static_cast<int>(x.ndim()) - 2) == 1;
  const Dtypes dtype = dtype_of(x);
  return {
      .rows = rows,
      .outs = weight.shape(0),
      .ins = ins,
      .is_16_bit = dtype == dtype_of(weight) && (dtype == kFloat16 || dtype == kBFloat16),
      .gated = gated,
      .overlaps = (!one_row && x.stride(static_cast<int>(x.ndim()) - 2) < ins) ||
                  (weight.shape(0) > 1 && weight.stride(0) < ins),
  };
}

}  // namespace

void linear_rows(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias, bool gated,
                 const std::optional<std::string>& plan, const TensorView& out) {
  Check check("linear_rows");
  Dim M{"rows"}, K{"in_features"}, W{gated ? "2 * out_features" : "out_features"}, N{"out_features"};
  check.strided("x", x, {M, K}, kFloat16 | kBFloat16);
  const Dtypes dtype = dtype_of(x);
  check.range("rows", M, 0, kMaxLinearRows);
  check.range("in_features", K, 64, INT32_MAX);
  check.that(K % 64 == 0, "in_features", {"is ", K}, "a multiple of 64");
  check.strided("weight", weight, {W, K}, dtype);
  check.range(W.name, W, 1, INT32_MAX);
  check.that(!gated || W % 16 == 0, W.name, {"is ", W}, "a multiple of 16");
  for (const auto& [name, tensor] : {std::pair{"x", &x}, {"weight", &weight}})
    check.that(copy_unit({tensor}) == 16, name, "has rows off 16 bytes", "rows that start on 16 bytes");
  check.tensor("bias", bias, {W}, dtype);
  N.value = gated ? W / 2 : W;
  check.strided_output("out", out, {M, N}, dtype);
  check.that(!plan || check.on_cuda(), "plan", {"is ", plan.value_or("")}, "None on cpu");
  if (M == 0) return;

  LinearRowsParams params{
      .x = x.data<void>(),
      .weight = weight.data<void>(),
      .bias = data_or_null<void>(bias),
      .y = out.data<void>(),
      .rows = M,
      .in = K,
      .out = N,
      .x_stride = x.stride(0),
      .weight_stride = weight.stride(0),
      .y_stride = out.stride(0),
      .dtype = dtype,
      .gated = gated,
      .plan = LinearPlan::kLibrary,
  };
  if (check.on_cuda()) params.plan = plan_linear_rows(check, shape_of(x, weight, gated), device_of(check), plan);
  SD_DISPATCH(check, stream, linear_rows, params);
}

std::string linear_rows_plan(const TensorView& x, const TensorView& weight, bool gated) {
  Check check("linear_rows_plan");
  Dim N{"out_features"}, K{"in_features"};
  check.strided("weight", weight, {N, K}, kFloats);
  check.that(x.ndim() > 0 && x.shape(static_cast<int>(x.ndim()) - 1) == K, "x", "has rows of another length",
             {"in_features=", K});
  if (!check.on_cuda()) return to_string(LinearPlan::kLibrary);
  return to_string(plan_linear(shape_of(x, weight, gated), device_of(check)));
}

void linear_rows_cpu(const LinearRowsParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row) {
      const auto* x = static_cast<const T*>(p.x) + row * p.x_stride;
      const auto product = [&](int64_t n) {
        const auto* weight = static_cast<const T*>(p.weight) + n * p.weight_stride;
        float sum = 0;
        for (int64_t k = 0; k < p.in; ++k) sum += to_float(x[k]) * to_float(weight[k]);
        return p.bias ? sum + to_float(static_cast<const T*>(p.bias)[n]) : sum;
      };
      auto* y = static_cast<T*>(p.y) + row * p.y_stride;
      for (int64_t n = 0; n < p.out; ++n)
        y[n] = from_float<T>(p.gated ? gated(product(n), product(p.out + n)) : product(n));
    }
  });
}

}  // namespace specdec::layers
