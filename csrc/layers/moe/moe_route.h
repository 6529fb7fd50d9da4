// moe_route: MoE routing. Selects each row's top-k experts by router score, from its best groups of experts if there
// are groups, computes routing weights by softmax or sigmoid, and sorts (row, expert) pairs by expert for
// moe_grouped_gemm. Experts that all rows share may follow the selected ones.
#pragma once

#include <cmath>
#include <string>

#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/floats.h"

namespace specdec::layers {

constexpr int64_t kMaxTopK = 32, kMaxGroups = 32;

struct MoeRouteParams {
  const void* scores;  // [rows, experts]
  const float* bias;   // [experts] or null, added to the sigmoids that experts are selected by
  // [rows] or null: scores of the shared experts' gate, whose sigmoids are their weights; null: 1.
  const void* shared_gate;
  int64_t* topk_ids;      // [rows, columns()], best first; ties go to the lower id, and NaN counts as -inf
  float* topk_weights;    // [rows, columns()]
  int64_t* sorted_pairs;  // [pairs()], indices into topk_ids, sorted by expert, then by row
  int32_t* expert_ends;   // [all_experts()], end of each expert's range in sorted_pairs
  int64_t rows, experts, top_k;
  int64_t num_shared;           // experts that follow the others, in the columns after each row's top_k
  int64_t n_group, topk_group;  // equal groups of adjacent experts, and those of a row that it selects from
  int64_t scores_stride, shared_gate_stride;  // between rows, in elements
  Dtypes dtype;                               // of scores and shared_gate
  bool renormalize;  // softmax over the selected experts, else over all; sigmoids over their sum
  bool sigmoid;      // weights are sigmoids of scores, not their softmax
  float scale;       // of the weights
  float eps;         // added to a sum of sigmoids before they are divided by it

  SD_HD int64_t columns() const { return top_k + num_shared; }
  SD_HD int64_t pairs() const { return rows * columns(); }
  SD_HD int64_t all_experts() const { return experts + num_shared; }
};

// Return a score's unnormalized softmax weight, given the largest score of its row.
SD_HD float score_weight(float score, float largest) { return expf(below_max(score, largest)); }

// Return the sigmoid of a score, NaN for NaN.
SD_HD float sigmoid(float score) { return div(1.0f, add(1.0f, expf(-score))); }

// Return the sigmoid of a score, 0 for NaN.
SD_HD float sigmoid_weight(float score) { return score == score ? sigmoid(score) : 0.0f; }

// Return the score of the gate of a row's shared experts; without a gate infinity, whose sigmoid is 1.
template <class T>
SD_HD float shared_gate_score(const MoeRouteParams& p, int64_t row) {
  return p.shared_gate ? to_float(static_cast<const T*>(p.shared_gate)[row * p.shared_gate_stride]) : INFINITY;
}

// Return the score of a group: the sum of its two best experts' with sigmoids (DeepSeek-V3), else its best expert's
// (DeepSeek-V2).
SD_HD float group_score(const MoeRouteParams& p, float best, float second) {
  return p.sigmoid ? add(best, second) : best;
}

// Return what a sigmoid router selects by.
SD_HD float sigmoid_choice(const MoeRouteParams& p, float score, int64_t expert) {
  return score == score ? add(sigmoid_weight(score), p.bias ? p.bias[expert] : 0.0f) : -INFINITY;
}

void moe_route(CallStream stream, const TensorView& scores, int64_t top_k, bool renormalize,
               const std::string& activation, const OptTensor& bias, double scale, double eps, int64_t n_group,
               int64_t topk_group, int64_t num_shared, const OptTensor& shared_gate, const TensorView& out_topk_ids,
               const TensorView& out_topk_weights, const TensorView& out_sorted_pairs,
               const TensorView& out_expert_ends);

void moe_route_cpu(const MoeRouteParams& p);
void moe_route_cuda(const MoeRouteParams& p, Stream stream);

}  // namespace specdec::layers
