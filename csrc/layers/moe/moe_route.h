// moe_route: which experts rows take, by their scores, and the pairs of both as moe_grouped_gemm multiplies them.
#pragma once

#include <cmath>

#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/floats.h"

namespace specdec::layers {

constexpr int64_t kMaxTaken = 32;

struct MoeRouteParams {
  const void* scores;  // [rows, experts]
  int64_t* chosen;     // [rows, taken], the best first; ties go to the lower number, and NaN counts as -inf
  float* shares;       // [rows, taken]
  int64_t* order;      // [rows * taken], pairs of a row and an expert of its: by experts, and then by rows
  int32_t* ends;       // [experts], where each one's pairs in `order` end
  int64_t rows, experts, taken;
  int64_t scores_stride;  // of rows, in items
  Dtypes dtype;
  bool normalised;  // shares are of those taken alone, else of all

  SD_HD int64_t pairs() const { return rows * taken; }
};

// What a score counts beside the largest of its row, before it is divided by the sum.
SD_HD float score_weight(float score, float largest) { return expf(below_max(score, largest)); }

void moe_route(CallStream stream, const TensorView& scores, int64_t taken, bool normalised,
               const TensorView& out_experts, const TensorView& out_shares, const TensorView& out_order,
               const TensorView& out_ends);

void moe_route_cpu(const MoeRouteParams& p);
void moe_route_cuda(const MoeRouteParams& p, Stream stream);

}  // namespace specdec::layers
