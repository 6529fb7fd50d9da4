// gated_rms_norm: RMSNorm of each group of a row's elements, and a gate on its result or on its input.
#pragma once

#include <cmath>

#include "core/dispatch.h"
#include "core/floats.h"
#include "layers/activation/silu_and_mul.h"

namespace specdec::layers {

struct GatedRmsNormParams {
  const void* x;       // [rows, groups, width], float32 or in the gate's dtype
  const void* gate;    // [rows, groups, width]
  const void* weight;  // [width], or [groups, width]
  void* out;           // [rows, groups, width], in the gate's dtype
  int64_t rows, groups, width;
  int64_t x_strides[2], gate_strides[2], out_strides[2];  // between rows and between groups, in elements
  int64_t weight_stride;                                  // between groups; 0: they share it
  float eps;
  Dtypes dtype;  // of gate, weight and out
  bool x_is_float32;
  bool gates_first;  // the norm is of x * act(gate)
  bool sigmoid;      // the activation is a sigmoid, not SiLU
};

// Return act(gate) * x.
SD_HD float gated(bool sigmoid, float gate, float x) {
  if (!sigmoid) return silu_mul(gate, x);
#ifdef __CUDA_ARCH__
  return x / (1 + __expf(-gate));
#else
  return x / (1 + std::exp(-gate));
#endif
}

// Call use<X, T>() for the types of x and of the gate.
template <class Use>
void with_gated_types(const GatedRmsNormParams& p, Use&& use) {
  with_float_type(p.dtype, [&]<class T>() {
    if (p.x_is_float32)
      use.template operator()<float, T>();
    else
      use.template operator()<T, T>();
  });
}

void gated_rms_norm(CallStream stream, const TensorView& x, const TensorView& gate, const TensorView& weight,
                    double eps, bool gates_first, const std::string& activation, const TensorView& out);

void gated_rms_norm_cpu(const GatedRmsNormParams& p);
void gated_rms_norm_cuda(const GatedRmsNormParams& p, Stream stream);

}  // namespace specdec::layers
