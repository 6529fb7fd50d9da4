// A pool of K or V as callers pass it: its strides, its dtypes, and what a 1.0 in it stands for.
#pragma once

#include "core/bytes.h"
#include "core/check.h"
#include "kv/page_rows.h"

namespace specdec::kv {

// A pool tensor whose dimension `pages` counts its pages.
inline PoolView pool_view(const TensorView& t, int pages) {
  return {.data = bytes(t),
          .page_stride = byte_stride(t, pages),
          .row_stride = byte_stride(t, pages + 1),
          .head_stride = byte_stride(t, pages + 2)};
}

// Items of a KV row that the kernels count in 32 bits with room to spare.
constexpr int64_t kMaxRowItems = int64_t{1} << 20;

constexpr Dtypes kKvDtypes = kFloats | kFloat8;

// The scale of a pool. Only pools of 8 bits may have one; others hold the numbers themselves.
inline float pool_scale(Check& check, const char* name, double scale, const TensorView& pool) {
  check.that(scale == 1 || dtype_of(pool) == kFloat8, name, {"is ", scale}, {"1 for pools of ", pool.dl.dtype});
  return check.factor(name, scale);
}

}  // namespace specdec::kv
