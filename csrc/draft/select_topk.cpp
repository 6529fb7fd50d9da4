#include "draft/select_topk.h"

#include <algorithm>
#include <limits>

#include "core/floats.h"

namespace specdec {

void select_topk(CallStream stream, const TensorView& logits, int64_t k, const OptTensor& id_map,
                 const TensorView& out_ids, const TensorView& out_logprobs) {
  Check check("select_topk");
  Dim R{"rows"}, V{"vocab"}, K{"k", k};
  check.strided("logits", logits, {R, V}, kFloats);
  check.range("vocab", V, 1, std::numeric_limits<int32_t>::max());
  check.range("k", k, 1, std::min<int64_t>(V, kMaxTopk));
  check.tensor("id_map", id_map, {V}, kInt32);
  check.output("out_ids", out_ids, {R, K}, kInt32);
  check.output("out_logprobs", out_logprobs, {R, K}, kFloat32);
  if (R == 0) return;

  const SelectTopkParams params{
      .logits = logits.data<void>(),
      .logits_dtype = dtype_of(logits),
      .logits_stride = logits.stride(0),
      .id_map = data_or_null<const int32_t>(id_map),
      .out_ids = out_ids.data<int32_t>(),
      .out_logprobs = out_logprobs.data<float>(),
      .rows = R,
      .vocab = V,
      .k = K,
  };
  SD_DISPATCH(check, stream, select_topk, params);
}

void select_topk_cpu(const SelectTopkParams& p) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  with_float_type(p.logits_dtype, [&]<class T>() {
    for (int64_t r = 0; r < p.rows; ++r) {
      const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
      // The k best so far, best first; a later equal value never displaces an earlier one, so ties go to the lower id.
      float best[kMaxTopk];
      int32_t best_id[kMaxTopk];
      int64_t held = 0;
      float max = kNone;
      double sum = 0;  // of exp(x - max)
      for (int64_t v = 0; v < p.vocab; ++v) {
        float x = to_float(row[v]);
        if (!(x == x)) x = kNone;  // NaN counts as -inf
        if (x > max) {
          sum = sum * std::exp(static_cast<double>(max) - x) + 1;
          max = x;
        } else if (x > kNone) {
          sum += std::exp(static_cast<double>(below_max(x, max)));
        }
        if (held == p.k && !(x > best[held - 1])) continue;
        int64_t i = held < p.k ? held++ : held - 1;
        for (; i > 0 && x > best[i - 1]; --i) {
          best[i] = best[i - 1];
          best_id[i] = best_id[i - 1];
        }
        best[i] = x;
        best_id[i] = static_cast<int32_t>(v);
      }
      const float log_sum = static_cast<float>(std::log(sum));
      for (int64_t j = 0; j < p.k; ++j) {
        p.out_ids[r * p.k + j] = p.id_map ? p.id_map[best_id[j]] : best_id[j];
        // A probability is at most 1, whatever the rounding: build_tree relies on children never beating parents.
        p.out_logprobs[r * p.k + j] = best[j] > kNone ? std::min(below_max(best[j], max) - log_sum, 0.0f) : kNone;
      }
    }
  });
}

}  // namespace specdec
