// K or V pools as callers pass them: strides, dtypes and scales.
#pragma once

#include "core/bytes.h"
#include "core/check.h"
#include "kv/page_rows.h"

namespace specdec::kv {

// Return the view of a pool tensor whose dimension `pages` counts its pages.
inline PoolView pool_view(const TensorView& t, int pages) {
  return {.data = bytes(t),
          .page_stride = byte_stride(t, pages),
          .row_stride = byte_stride(t, pages + 1),
          .head_stride = byte_stride(t, pages + 2)};
}

// Maximum elements of a KV row: kernels count them in 32 bits, with a margin.
constexpr int64_t kMaxRowItems = int64_t{1} << 20;

constexpr Dtypes kKvDtypes = kFloats | kFloat8;

// Return a pool's scale. Only FP8 pools may have one.
inline float pool_scale(Check& check, const char* name, double scale, const TensorView& pool) {
  check.that(scale == 1 || dtype_of(pool) == kFloat8, name, {"is ", scale}, {"1 for pools of ", pool.dl.dtype});
  return check.factor(name, scale);
}

}  // namespace specdec::kv
