// Pools of 8-bit floats, and what a 1.0 in them stands for.
#pragma once

#include "core/check.h"

namespace specdec {

constexpr Dtypes kKvDtypes = kFloats | kFloat8;

// Other pools hold what they mean.
inline float pool_scale(Check& check, const char* name, double scale, const TensorView& pool) {
  if (scale != 1 && !(dtype_of(pool) == kFloat8))
    check.that(false, name, "is " + std::to_string(scale), "1 for pools of " + dtype_name(pool));
  return check.factor(name, scale);
}

}  // namespace specdec
