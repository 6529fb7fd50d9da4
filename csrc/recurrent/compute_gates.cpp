#include "recurrent/compute_gates.h"

#include <limits>

#include "recurrent/tree_recurrence.h"

namespace specdec::recurrent {

void compute_gates(CallStream stream, const TensorView& a, const OptTensor& b, const TensorView& decay,
                   const TensorView& dt_bias, std::optional<double> dt_min, std::optional<double> dt_max,
                   const TensorView& g, const TensorView& beta) {
  Check check("compute_gates");
  Dim M{"rows"}, H{"value_heads"}, D{"key_dim"};
  const bool by_channel = a.ndim() == 3;
  if (by_channel)
    check.strided("a", a, {M, H, D}, kFloats);
  else
    check.strided("a", a, {M, H}, kFloats);
  const Dtypes dtype = dtype_of(a);
  check.range("value_heads", H, 1, 32767);
  if (by_channel) check.range("key_dim", D, 1, kMaxHeadDim);
  check.that(b.has_value() || !by_channel, "b", "is None", "a tensor, as a has 3 dimensions");
  if (b) check.strided("b", *b, {M, H}, dtype);
  check.tensor("decay", decay, {H}, kFloat32);
  if (by_channel)
    check.tensor("dt_bias", dt_bias, {H, D}, dtype | kFloat32);
  else
    check.tensor("dt_bias", dt_bias, {H}, dtype | kFloat32);
  const double low = dt_min.value_or(0), high = dt_max.value_or(std::numeric_limits<double>::infinity());
  check.that(low >= 0, "dt_min", {"is ", low}, "0 or more");
  check.that(high >= low, "dt_max", {"is ", high}, {"dt_min=", low, " or more"});
  if (by_channel)
    check.output("g", g, {M, H, D}, kFloat32);
  else
    check.output("g", g, {M, H}, kFloat32);
  check.output("beta", beta, {M, H}, kFloat32);
  if (M == 0) return;

  const ComputeGatesParams params{
      .a = a.data<void>(),
      .b = data_or_null<const void>(b),
      .decay = decay.data<float>(),
      .dt_bias = dt_bias.data<void>(),
      .g = g.data<float>(),
      .beta = beta.data<float>(),
      .rows = M,
      .heads = H,
      .channels = by_channel ? D.value : 1,
      .a_row = a.stride(0),
      .a_head = a.stride(1),
      .b_row = b ? b->stride(0) : 0,
      .dtype = dtype,
      .bias_is_float32 = dtype_of(dt_bias) == kFloat32,
      .dt_min = static_cast<float>(low),
      .dt_max = static_cast<float>(high),
  };
  SD_DISPATCH(check, stream, compute_gates, params);
}

void compute_gates_cpu(const ComputeGatesParams& p) {
  with_gate_types(p, [&]<class T, class Bias>() {
    const Bias* const bias = static_cast<const Bias*>(p.dt_bias);
    for (int64_t row = 0; row < p.rows; ++row)
      for (int64_t head = 0; head < p.heads; ++head) {
        const T* const a = static_cast<const T*>(p.a) + row * p.a_row + head * p.a_head;
        const int64_t first = (row * p.heads + head) * p.channels;
        float dt = 0;
        for (int64_t d = 0; d < p.channels; ++d) {
          dt = time_step(p, to_float(a[d]) + to_float(bias[head * p.channels + d]));
          p.g[first + d] = p.decay[head] * dt;
        }
        p.beta[row * p.heads + head] =
            p.b == nullptr ? dt : sigmoid(to_float(static_cast<const T*>(p.b)[row * p.b_row + head]));
      }
  });
}

}  // namespace specdec::recurrent
