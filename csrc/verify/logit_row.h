// One node's logits as verification reads them: plus the request's bias, minus the tokens that a grammar forbids.
#pragma once

#include "core/exact_math.h"
#include "core/floats.h"

namespace specdec::verify {

template <class T>
struct LogitRow {
  const T* logits;         // [vocab]
  const float* bias;       // [vocab] or null
  const int32_t* allowed;  // [ceil(vocab / 32)] or null: bit v % 32 of word v / 32 allows token v

  // Return the logit after bias and mask; NaN and forbidden tokens become -inf.
  SD_HD float adjusted(float x, int64_t v) const {
    if (bias) x = add(x, bias[v]);
    if (allowed && !(static_cast<uint32_t>(allowed[v >> 5]) >> (v & 31) & 1)) x = -INFINITY;
    return x == x ? x : -INFINITY;
  }
  SD_HD float operator[](int64_t v) const { return adjusted(to_float(logits[v]), v); }
};

}  // namespace specdec::verify
