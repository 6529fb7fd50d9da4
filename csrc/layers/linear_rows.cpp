#include "layers/linear_rows.h"

#include "kv/bytes.h"
#include "layers/gate_rows.h"

namespace specdec {

void linear_rows(CallStream stream, const TensorView& x, const TensorView& weight, const OptTensor& bias, bool gated,
                 const TensorView& out) {
  Check check("linear_rows");
  Dim M{"rows"}, K{"in_features"}, W{gated ? "2 * out_features" : "out_features"}, N{"out_features"};
  check.strided("x", x, {M, K}, kFloat16 | kBFloat16);
  const Dtypes dtype = dtype_of(x);
  check.range("rows", M, 0, kMaxLinearRows);
  check.range("in_features", K, 64, INT32_MAX);
  check.that(K % 64 == 0, "in_features", "is " + std::to_string(K.value), "a multiple of 64");
  check.strided("weight", weight, {W, K}, dtype);
  check.range(W.name, W, 1, INT32_MAX);
  check.that(!gated || W % 16 == 0, W.name, "is " + std::to_string(W.value), "a multiple of 16");
  check.that(copy_unit({&x, &weight}) == 16, "x or weight", "has rows off 16 bytes", "rows that start on 16 bytes");
  check.tensor("bias", bias, {W}, dtype);
  N.value = gated ? W / 2 : W;
  check.strided_output("out", out, {M, N}, dtype);
  if (M == 0) return;

  const LinearRowsParams params{
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
  };
  SD_DISPATCH(check, stream, linear_rows, params);
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

#ifndef SPECDEC_WITH_CUDA
bool has_wgmma() { return false; }
bool many_rows_fill(int64_t, int64_t) { return false; }
#endif

}  // namespace specdec
