// moe_grouped_gemm: rows times the weights of the experts that they take, of which each is read once for few rows.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::layers {

constexpr int64_t kMaxExperts = 1024;

struct MoeGroupedGemmParams {
  const void* x;         // [rows, in]
  const void* weight;    // [experts, out, in]; gated: [experts, 2 * out, in], of which the first halves are gates
  const int64_t* order;  // [pairs], pairs of a row and an expert that it takes: pair i is of row i * rows / pairs
  const int32_t* ends;   // [experts], where each one's pairs in `order` end
  // Or null: [groups, rows] of float8_e4m3fn x, and [experts, groups, out], or 2 * out of a gate, of such a weight; one
  // group of a whole row or one of each 128 numbers.
  const float *x_scales, *weight_scales;
  void* out;  // [pairs, out]
  int64_t rows, pairs, experts, in, outs, groups;
  int64_t x_stride, x_scales_stride, out_stride;  // of rows, in items; of groups
  Dtypes dtype;                                   // of out, and of x and weight unless they have scales
  bool gated;                                     // out is silu(gate) * up; outs is a multiple of 8
  bool again;                                     // not the first call since `order` and `ends` were written

  SD_HD int64_t weight_rows() const { return gated ? 2 * outs : outs; }
  // Where the pairs of an expert begin, or of the one behind the last; within `order`, whatever the data says.
  SD_HD int64_t begin(int64_t expert) const {
    const int64_t end = expert > 0 ? ends[expert - 1] : 0;
    return end < 0 ? 0 : end < pairs ? end : pairs;
  }
  SD_HD int64_t pair(int64_t place) const {
    const int64_t pair = order[place];
    return pair < 0 ? 0 : pair < pairs ? pair : pairs - 1;
  }
};

void moe_grouped_gemm(CallStream stream, const TensorView& x, const TensorView& weight, const TensorView& order,
                      const TensorView& ends, const OptTensor& x_scales, const OptTensor& weight_scales, bool gated,
                      bool again, const TensorView& out);

void moe_grouped_gemm_cpu(const MoeGroupedGemmParams& p);
void moe_grouped_gemm_cuda(const MoeGroupedGemmParams& p, Stream stream);

}  // namespace specdec::layers
