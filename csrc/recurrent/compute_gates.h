// compute_gates: decays and betas of a recurrence, from what a layer projects.
//
// A time step is dt = softplus(a + dt_bias), within [dt_min, dt_max]; a log decay is g = decay * dt; beta is
// sigmoid(b), or dt without b.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::recurrent {

struct ComputeGatesParams {
  const void* a;        // [rows, heads, channels]
  const void* b;        // [rows, heads], or null
  const float* decay;   // [heads]
  const void* dt_bias;  // [heads, channels]
  float* g;             // [rows, heads, channels]
  float* beta;          // [rows, heads]
  int64_t rows, heads, channels;
  int64_t a_row, a_head, b_row;  // strides in elements
  Dtypes dtype;                  // of a and b
  bool bias_is_float32;          // dt_bias has a's dtype otherwise
  float dt_min, dt_max;
};

SD_HD float time_step(const ComputeGatesParams& p, float x) {
  const float dt = x > 20 ? x : log1pf(expf(x));  // as torch computes softplus
  return fminf(fmaxf(dt, p.dt_min), p.dt_max);
}

SD_HD float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Call use<T, Bias>() for the types of a and of dt_bias.
template <class Use>
void with_gate_types(const ComputeGatesParams& p, Use&& use) {
  with_float_type(p.dtype, [&]<class T>() {
    if (p.bias_is_float32)
      use.template operator()<T, float>();
    else
      use.template operator()<T, T>();
  });
}

void compute_gates(CallStream stream, const TensorView& a, const OptTensor& b, const TensorView& decay,
                   const TensorView& dt_bias, std::optional<double> dt_min, std::optional<double> dt_max,
                   const TensorView& g, const TensorView& beta);

void compute_gates_cpu(const ComputeGatesParams& p);
void compute_gates_cuda(const ComputeGatesParams& p, Stream stream);

}  // namespace specdec::recurrent
