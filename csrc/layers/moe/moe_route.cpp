#include "layers/moe/moe_route.h"

#include <algorithm>

#include "core/best_list.h"
#include "core/row_softmax.h"
#include "layers/gemm/small_m_gemm.h"
#include "layers/moe/moe_grouped_gemm.h"

namespace specdec::layers {

void moe_route(CallStream stream, const TensorView& scores, int64_t taken, bool normalised,
               const TensorView& out_experts, const TensorView& out_shares, const TensorView& out_order,
               const TensorView& out_ends) {
  Check check("moe_route");
  Dim T{"rows"}, E{"experts"}, J{"taken", taken};
  check.strided("scores", scores, {T, E}, kFloats);
  check.range("experts", E, 1, kMaxExperts);
  check.range("taken", taken, 1, std::min<int64_t>(E, kMaxTaken));
  Dim M{"pairs", T * J};
  check.range("pairs", M, 0, kMaxSmallMGemm);
  check.output("out.experts", out_experts, {T, J}, kInt64);
  check.output("out.shares", out_shares, {T, J}, kFloat32);
  check.output("out.order", out_order, {M}, kInt64);
  check.output("out.ends", out_ends, {E}, kInt32);

  const MoeRouteParams params{
      .scores = scores.data<void>(),
      .chosen = out_experts.data<int64_t>(),
      .shares = out_shares.data<float>(),
      .order = out_order.data<int64_t>(),
      .ends = out_ends.data<int32_t>(),
      .rows = T,
      .experts = E,
      .taken = J,
      .scores_stride = scores.stride(0),
      .dtype = dtype_of(scores),
      .normalised = normalised,
  };
  SD_DISPATCH(check, stream, moe_route, params);
}

void moe_route_cpu(const MoeRouteParams& p) {
  with_float_type(p.dtype, [&]<class T>() {
    for (int64_t row = 0; row < p.rows; ++row) {
      const T* const scores = static_cast<const T*>(p.scores) + row * p.scores_stride;
      BestList<kMaxTaken> best(static_cast<int>(p.taken));
      offer_row(scores, p.experts, best);
      const float largest = best.scores()[0];
      float sum = 0;
      for (int64_t e = 0; e < p.experts && !p.normalised; ++e) {
        const float score = to_float(scores[e]);
        sum += score_weight(score == score ? score : -INFINITY, largest);
      }
      for (int64_t j = 0; j < p.taken; ++j) {
        float& share = p.shares[row * p.taken + j] = score_weight(best.scores()[j], largest);
        sum += p.normalised ? share : 0;
        p.chosen[row * p.taken + j] = best.numbers()[j];
      }
      for (int64_t j = 0; j < p.taken; ++j) p.shares[row * p.taken + j] /= sum;
    }
  });

  // Pairs are counted, and then put where their experts' begin.
  std::fill_n(p.ends, p.experts, 0);
  for (int64_t pair = 0; pair < p.pairs(); ++pair) ++p.ends[p.chosen[pair]];
  for (int64_t e = 1; e < p.experts; ++e) p.ends[e] += p.ends[e - 1];
  for (int64_t pair = p.pairs() - 1; pair >= 0; --pair) p.order[--p.ends[p.chosen[pair]]] = pair;
  for (int64_t e = 0; e + 1 < p.experts; ++e) p.ends[e] = p.ends[e + 1];
  p.ends[p.experts - 1] = static_cast<int32_t>(p.pairs());
}

}  // namespace specdec::layers
