// select_topk: argument checks and the CPU implementation.
#include "draft/select_topk.h"

#include <algorithm>
#include <limits>

#include "core/best_list.h"
#include "core/row_softmax.h"

namespace specdec::draft {

void select_topk(CallStream stream, const TensorView& logits, int64_t k, const OptTensor& id_map,
                 const TensorView& out_ids, const TensorView& out_logprobs) {
  Check check("select_topk");
  Dim R{"rows"}, V{"vocab"}, K{"k", k};
  check.strided("logits", logits, {R, V}, kFloats);
  check.range("vocab", V, 1, std::numeric_limits<int32_t>::max());
  check.range("k", k, 1, std::min<int64_t>(V, kMaxTopk));
  check.tensor("id_map", id_map, {V}, kInt32);
  check.output("out.ids", out_ids, {R, K}, kInt32);
  check.output("out.logprobs", out_logprobs, {R, K}, kFloat32);
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
  with_float_type(p.logits_dtype, [&]<class T>() {
    for (int64_t r = 0; r < p.rows; ++r) {
      const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
      const RowSoftmax softmax(row, p.vocab, kLog2e);
      BestList<kMaxTopk> best(static_cast<int>(p.k));
      offer_row(row, p.vocab, best);
      for (int64_t j = 0; j < p.k; ++j) {
        const int32_t id = best.ids()[j];
        p.out_ids[r * p.k + j] = p.id_map ? p.id_map[id] : id;
        p.out_logprobs[r * p.k + j] = softmax.logprob(best.scores()[j]);
      }
    }
  });
}

}  // namespace specdec::draft
