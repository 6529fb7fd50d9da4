#include "layers/norm/gated_rms_norm.h"

namespace specdec::layers {

void gated_rms_norm(CallStream stream, const TensorView& x, const TensorView& gate, const TensorView& weight,
                    double eps, bool gates_first, const std::string& activation, const TensorView& out) {
  Check check("gated_rms_norm");
  Dim T{"rows"}, G{"groups"}, D{"width"}, W{"weights"};
  check.strided("gate", gate, {T, G, D}, kFloats);
  const Dtypes dtype = dtype_of(gate);
  check.range("width", D, 1, INT32_MAX);
  check.strided("x", x, {T, G, D}, dtype | kFloat32);
  check.tensor("weight", weight, {W}, dtype);
  check.that(W == D || W == G * D, "weight", {"has ", W, " elements"}, {"width=", D, " or groups * width=", G * D});
  const float epsilon = check.factor("eps", eps);
  check.that(activation == "silu" || activation == "sigmoid", "activation", {"is ", activation}, "silu or sigmoid");
  check.strided_output("out", out, {T, G, D}, dtype);
  if (T == 0 || G == 0) return;

  const GatedRmsNormParams params{
      .x = x.data<void>(),
      .gate = gate.data<void>(),
      .weight = weight.data<void>(),
      .out = out.data<void>(),
      .rows = T,
      .groups = G,
      .width = D,
      .x_strides = {x.stride(0), x.stride(1)},
      .gate_strides = {gate.stride(0), gate.stride(1)},
      .out_strides = {out.stride(0), out.stride(1)},
      .weight_stride = W == D ? 0 : D.value,
      .eps = epsilon,
      .dtype = dtype,
      .x_is_float32 = dtype_of(x) == kFloat32,
      .gates_first = gates_first,
      .sigmoid = activation == "sigmoid",
  };
  SD_DISPATCH(check, stream, gated_rms_norm, params);
}

void gated_rms_norm_cpu(const GatedRmsNormParams& p) {
  with_gated_types(p, [&]<class X, class T>() {
    for (int64_t row = 0; row < p.rows; ++row)
      for (int64_t group = 0; group < p.groups; ++group) {
        const X* const x = static_cast<const X*>(p.x) + row * p.x_strides[0] + group * p.x_strides[1];
        const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_strides[0] + group * p.gate_strides[1];
        const T* const weight = static_cast<const T*>(p.weight) + group * p.weight_stride;
        T* const out = static_cast<T*>(p.out) + row * p.out_strides[0] + group * p.out_strides[1];
        const auto normed_value = [&](int64_t i) {
          return p.gates_first ? gated(p.sigmoid, to_float(gate[i]), to_float(x[i])) : to_float(x[i]);
        };
        double squares = 0;
        for (int64_t i = 0; i < p.width; ++i) {
          const double value = normed_value(i);
          squares += value * value;
        }
        const float scale = 1 / std::sqrt(static_cast<float>(squares / static_cast<double>(p.width)) + p.eps);
        for (int64_t i = 0; i < p.width; ++i) {
          const float normed = normed_value(i) * scale * to_float(weight[i]);
          out[i] = from_float<T>(p.gates_first ? normed : gated(p.sigmoid, to_float(gate[i]), normed));
        }
      }
  });
}

}  // namespace specdec::layers
