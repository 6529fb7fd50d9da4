// rms_norm_row_cpu: RMSNorm of one row on the CPU.
#pragma once

#include <cmath>

#include "core/floats.h"

namespace specdec::layers {

template <class T>
void rms_norm_row_cpu(const T* x, const T* weight, int64_t width, float eps, T* out) {
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) squares += static_cast<double>(to_float(x[i])) * to_float(x[i]);
  const float scale = 1 / std::sqrt(static_cast<float>(squares / static_cast<double>(width)) + eps);
  for (int64_t i = 0; i < width; ++i) out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]));
}

}  // namespace specdec::layers
