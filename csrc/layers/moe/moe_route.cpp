#include "layers/moe/moe_route.h"

#include <algorithm>

#include "core/best_list.h"
#include "core/row_softmax.h"
#include "layers/gemm/small_m_gemm.h"
#include "layers/moe/moe_grouped_gemm.h"

namespace specdec::layers {

void moe_route(CallStream stream, const TensorView& scores, int64_t top_k, bool renormalize,
               const std::string& activation, const OptTensor& bias, double scale, double eps, int64_t n_group,
               int64_t topk_group, int64_t num_shared, const OptTensor& shared_gate, const TensorView& out_topk_ids,
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
  check.that(eps >= 0 && eps <= 1, "eps", {"is ", eps}, {"0 to 1"});
  check.range("n_group", n_group, 1, kMaxGroups);
  check.range("topk_group", topk_group, 1, n_group);
  const int64_t group = E / n_group;  // experts of one
  check.that(E % n_group == 0 && (n_group == 1 || group > 1), "n_group", {"is ", n_group},
             {"a divisor of ", int64_t{E}, " experts that leaves each group 2 or more"});
  check.that(top_k <= topk_group * group, "top_k", {"is ", top_k},
             {"at most ", topk_group * group, ", as many experts as topk_group=", topk_group, " has"});
  check.tensor("bias", bias, {E}, kFloat32);
  const float factor = check.factor("scale", scale);
  check.range("num_shared", num_shared, 0, kMaxTopK - top_k);
  Dim A{num_shared > 0 ? "experts + num_shared" : "experts", E + num_shared};
  check.range(A.name, A, 1, kMaxExperts);
  check.that(num_shared > 0 || !shared_gate, "shared_gate", "is given", "none without num_shared");
  if (shared_gate) check.strided("shared_gate", *shared_gate, {T, 1}, dtype_of(scores));
  Dim C{num_shared > 0 ? "top_k + num_shared" : "top_k", J + num_shared}, M{"pairs", T * C};
  check.range("pairs", M, 0, kMaxSmallMRows);
  check.output("out.topk_ids", out_topk_ids, {T, C}, kInt64);
  check.output("out.topk_weights", out_topk_weights, {T, C}, kFloat32);
  check.output("out.sorted_pairs", out_sorted_pairs, {M}, kInt64);
  check.output("out.expert_ends", out_expert_ends, {A}, kInt32);

  const MoeRouteParams params{
      .scores = scores.data<void>(),
      .bias = data_or_null<const float>(bias),
      .shared_gate = data_or_null<void>(shared_gate),
      .topk_ids = out_topk_ids.data<int64_t>(),
      .topk_weights = out_topk_weights.data<float>(),
      .sorted_pairs = out_sorted_pairs.data<int64_t>(),
      .expert_ends = out_expert_ends.data<int32_t>(),
      .rows = T,
      .experts = E,
      .top_k = J,
      .num_shared = num_shared,
      .n_group = n_group,
      .topk_group = topk_group,
      .scores_stride = scores.stride(0),
      .shared_gate_stride = shared_gate ? shared_gate->stride(0) : 0,
      .dtype = dtype_of(scores),
      .renormalize = renormalize,
      .sigmoid = sigmoid,
      .scale = factor,
      .eps = static_cast<float>(eps),
  };
  SD_DISPATCH(check, stream, moe_route, params);
}

namespace {

// Select a row's experts by their choices [experts], from its best groups.
BestList<kMaxTopK> select_experts(const MoeRouteParams& p, const float* choices) {
  BestList<kMaxTopK> best(static_cast<int>(p.top_k));
  if (p.n_group == 1) {
    offer_row(choices, p.experts, best);
    return best;
  }
  const int64_t each = p.experts / p.n_group;
  BestList<kMaxGroups> groups(static_cast<int>(p.topk_group));
  for (int64_t g = 0; g < p.n_group; ++g) {
    BestList<2> of_group(2);
    offer_row(choices + g * each, each, of_group);
    groups.offer(group_score(p, of_group.scores()[0], of_group.scores()[1]), static_cast<int32_t>(g));
  }
  bool kept[kMaxGroups] = {};
  for (int i = 0; i < groups.count(); ++i) kept[groups.ids()[i]] = true;
  for (int64_t e = 0; e < p.experts; ++e)
    if (kept[e / each]) best.offer(choices[e], static_cast<int32_t>(e));
  return best;
}

template <class T>
void route_row(const MoeRouteParams& p, int64_t row) {
  const T* const scores = static_cast<const T*>(p.scores) + row * p.scores_stride;
  float choices[kMaxExperts];  // what experts are selected by
  for (int64_t e = 0; e < p.experts; ++e) {
    const float score = to_float(scores[e]);
    choices[e] = p.sigmoid ? sigmoid_choice(p, score, e) : score == score ? score : -INFINITY;
  }
  const BestList<kMaxTopK> best = select_experts(p, choices);
  float sum = p.sigmoid ? (p.renormalize ? p.eps : 1) : 0;
  for (int64_t e = 0; e < p.experts && !p.sigmoid && !p.renormalize; ++e)
    sum += score_weight(choices[e], best.scores()[0]);
  int64_t* const ids = p.topk_ids + row * p.columns();
  float* const weights = p.topk_weights + row * p.columns();
  for (int64_t j = 0; j < p.top_k; ++j) {
    ids[j] = best.ids()[j];
    weights[j] =
        p.sigmoid ? sigmoid_weight(to_float(scores[ids[j]])) : score_weight(best.scores()[j], best.scores()[0]);
    sum += p.renormalize ? weights[j] : 0;
  }
  for (int64_t j = 0; j < p.top_k; ++j) weights[j] = weights[j] / sum * p.scale;
  for (int64_t j = p.top_k; j < p.columns(); ++j) {
    ids[j] = p.experts + j - p.top_k;
    weights[j] = sigmoid(shared_gate_score<T>(p, row));
  }
}

}  // namespace

void moe_route_cpu(const MoeRouteParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row) route_row<T>(p, row);
  });

  // Counting sort by expert.
  const int64_t experts = p.all_experts();
  std::fill_n(p.expert_ends, experts, 0);
  for (int64_t pair = 0; pair < p.pairs(); ++pair) ++p.expert_ends[p.topk_ids[pair]];
  for (int64_t e = 1; e < experts; ++e) p.expert_ends[e] += p.expert_ends[e - 1];
  for (int64_t pair = p.pairs() - 1; pair >= 0; --pair) p.sorted_pairs[--p.expert_ends[p.topk_ids[pair]]] = pair;
  for (int64_t e = 0; e + 1 < experts; ++e) p.expert_ends[e] = p.expert_ends[e + 1];
  p.expert_ends[experts - 1] = static_cast<int32_t>(p.pairs());
}

}  // namespace specdec::layers
