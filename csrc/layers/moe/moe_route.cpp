#include "layers/moe/moe_route.h"

#include <algorithm>

#include "core/best_list.h"
#include "core/row_softmax.h"
#include "layers/gemm/small_m_gemm.h"
#include "layers/moe/moe_grouped_gemm.h"

namespace specdec::layers {

void moe_route(CallStream stream, const TensorView& scores, int64_t top_k, bool renormalize,
               const std::string& activation, const OptTensor& bias, double scale, const TensorView& out_topk_ids,
               const TensorView& out_topk_weights, const TensorView& out_sorted_pairs,
               const TensorView& out_expert_ends) {
  Check check("moe_route");
  Dim T{"rows"}, E{"experts"}, J{"top_k", top_k};
  check.strided("scores", scores, {T, E}, kFloats);
  check.range("experts", E, 1, kMaxExperts);
  check.range("top_k", top_k, 1, std::min<int64_t>(E, kMaxTopK));
  check.that(activation == "softmax" || activation == "sigmoid", "activation", {"is ", activation},
             {"softmax or sigmoid"});
  const bool sigmoid = activation == "sigmoid";
  check.that(sigmoid || !bias, "bias", {"is given"}, {"none with softmax"});
  check.that(sigmoid || scale == 1, "scale", {"is ", scale}, {"1 with softmax"});
  check.tensor("bias", bias, {E}, kFloat32);
  const float factor = check.factor("scale", scale);
  Dim M{"pairs", T * J};
  check.range("pairs", M, 0, kMaxSmallMRows);
  check.output("out.topk_ids", out_topk_ids, {T, J}, kInt64);
  check.output("out.topk_weights", out_topk_weights, {T, J}, kFloat32);
  check.output("out.sorted_pairs", out_sorted_pairs, {M}, kInt64);
  check.output("out.expert_ends", out_expert_ends, {E}, kInt32);

  const MoeRouteParams params{
      .scores = scores.data<void>(),
      .bias = data_or_null<const float>(bias),
      .topk_ids = out_topk_ids.data<int64_t>(),
      .topk_weights = out_topk_weights.data<float>(),
      .sorted_pairs = out_sorted_pairs.data<int64_t>(),
      .expert_ends = out_expert_ends.data<int32_t>(),
      .rows = T,
      .experts = E,
      .top_k = J,
      .scores_stride = scores.stride(0),
      .dtype = dtype_of(scores),
      .renormalize = renormalize,
      .sigmoid = sigmoid,
      .scale = factor,
  };
  SD_DISPATCH(check, stream, moe_route, params);
}

namespace {

template <class T>
void select_by_sigmoid(const MoeRouteParams& p, int64_t row, const T* scores) {
  BestList<kMaxTopK> best(static_cast<int>(p.top_k));
  for (int64_t e = 0; e < p.experts; ++e)
    best.offer(sigmoid_choice(p, to_float(scores[e]), e), static_cast<int32_t>(e));
  float* const weights = p.topk_weights + row * p.top_k;
  float sum = p.renormalize ? kSigmoidSumEps : 1;
  for (int64_t j = 0; j < p.top_k; ++j) {
    p.topk_ids[row * p.top_k + j] = best.ids()[j];
    weights[j] = sigmoid_weight(to_float(scores[best.ids()[j]]));
    sum += p.renormalize ? weights[j] : 0;
  }
  for (int64_t j = 0; j < p.top_k; ++j) weights[j] = weights[j] / sum * p.scale;
}

}  // namespace

void moe_route_cpu(const MoeRouteParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row) {
      const T* const scores = static_cast<const T*>(p.scores) + row * p.scores_stride;
      if (p.sigmoid) {
        select_by_sigmoid(p, row, scores);
        continue;
      }
      BestList<kMaxTopK> best(static_cast<int>(p.top_k));
      offer_row(scores, p.experts, best);
      const float largest = best.scores()[0];
      float sum = 0;
      for (int64_t e = 0; e < p.experts && !p.renormalize; ++e) {
        const float score = to_float(scores[e]);
        sum += score_weight(score == score ? score : -INFINITY, largest);
      }
      for (int64_t j = 0; j < p.top_k; ++j) {
        float& weight = p.topk_weights[row * p.top_k + j] = score_weight(best.scores()[j], largest);
        sum += p.renormalize ? weight : 0;
        p.topk_ids[row * p.top_k + j] = best.ids()[j];
      }
      for (int64_t j = 0; j < p.top_k; ++j) p.topk_weights[row * p.top_k + j] /= sum;
    }
  });

  // Counting sort by expert.
  std::fill_n(p.expert_ends, p.experts, 0);
  for (int64_t pair = 0; pair < p.pairs(); ++pair) ++p.expert_ends[p.topk_ids[pair]];
  for (int64_t e = 1; e < p.experts; ++e) p.expert_ends[e] += p.expert_ends[e - 1];
  for (int64_t pair = p.pairs() - 1; pair >= 0; --pair) p.sorted_pairs[--p.expert_ends[p.topk_ids[pair]]] = pair;
  for (int64_t e = 0; e + 1 < p.experts; ++e) p.expert_ends[e] = p.expert_ends[e + 1];
  p.expert_ends[p.experts - 1] = static_cast<int32_t>(p.pairs());
}

}  // namespace specdec::layers
