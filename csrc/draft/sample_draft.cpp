// sample_draft: argument checks and the CPU implementation.
#include "draft/sample_draft.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/best_list.h"
#include "core/row_softmax.h"
#include "draft/select_topk.h"

namespace specdec::draft {
namespace {

using Best = BestList<kMaxTopk>;

template <class T>
void draw(const DraftRow& state, const T* row, int64_t vocab, float max, Best& best) {
  for (int64_t first = 0; first < vocab; first += kNoiseIds) {
    const Noise words = state.noise_of(static_cast<uint32_t>(first / kNoiseIds));
    const int64_t end = std::min<int64_t>(first + kNoiseIds, vocab);
    for (int64_t v = first; v < end; ++v) {
      const float weight = log2_weight(to_float(row[v]), max, state.scale);
      const uint32_t word = words.words[v - first];
      // Most entries do not need their logarithms: E >= v log2(e), and v >= 2^-(zeros + 1).
      const float at_most = weight + (static_cast<float>(std::countl_zero(word)) + 0.48f);
      if (best.accepts(at_most)) best.offer(perturbed(weight, word), static_cast<int32_t>(v));
    }
  }
}

}  // namespace

void sample_draft(CallStream stream, const TensorView& logits, int64_t k, const TensorView& seeds,
                  const TensorView& positions, const TensorView& temperature, const OptTensor& slots,
                  const OptTensor& id_map, const TensorView& out_ids, const TensorView& out_logprobs) {
  Check check("sample_draft");
  Dim R{"rows"}, V{"vocab"}, K{"k", k}, B{"batch"}, S{"num_slots"};
  check.strided("logits", logits, {R, V}, kFloats);
  check.range("vocab", V, 1, std::numeric_limits<int32_t>::max());
  check.range("k", k, 1, std::min<int64_t>(V, kMaxTopk));
  check.tensor("seeds", seeds, {S}, kInt64);
  check.tensor("positions", positions, {R}, kInt32);
  check.tensor("temperature", temperature, {S}, kFloat32);
  if (!slots) B.value = S;
  check.slots(slots, B, S);
  check.that(B == 0 ? R == 0 : R % B == 0, "logits", {"has ", R, " rows"}, {"a multiple of batch=", B});
  check.tensor("id_map", id_map, {V}, kInt32);
  check.output("out.ids", out_ids, {R, K}, kInt32);
  check.output("out.logprobs", out_logprobs, {R, K}, kFloat32);
  if (R == 0) return;

  const SampleDraftParams params{
      .logits = logits.data<void>(),
      .logits_dtype = dtype_of(logits),
      .logits_stride = logits.stride(0),
      .positions = positions.data<const int32_t>(),
      .seeds = seeds.data<const int64_t>(),
      .temperature = temperature.data<const float>(),
      .slots = data_or_null<const int32_t>(slots),
      .id_map = data_or_null<const int32_t>(id_map),
      .out_ids = out_ids.data<int32_t>(),
      .out_logprobs = out_logprobs.data<float>(),
      .rows = R,
      .rows_per_request = R / B,
      .vocab = V,
      .k = K,
      .num_slots = S,
  };
  SD_DISPATCH(check, stream, sample_draft, params);
}

void sample_draft_cpu(const SampleDraftParams& p) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    for (int64_t r = 0; r < p.rows; ++r) {
      int32_t* ids = p.out_ids + r * p.k;
      float* logprobs = p.out_logprobs + r * p.k;
      const DraftRow state = draft_row(p, r / p.rows_per_request, r % p.rows_per_request);
      if (state.slot < 0) {
        std::fill_n(ids, p.k, 0);
        std::fill_n(logprobs, p.k, -INFINITY);
        continue;
      }
      const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;
      const bool greedy = state.scale == 0;
      const RowSoftmax softmax(row, p.vocab, greedy ? kLog2e : state.scale);
      Best best(static_cast<int>(p.k));
      if (greedy)
        offer_row(row, p.vocab, best);
      else
        draw(state, row, p.vocab, softmax.max(), best);
      for (int64_t j = 0; j < p.k; ++j) {
        const int32_t id = best.ids()[j];
        ids[j] = p.id_map ? p.id_map[id] : id;
        logprobs[j] = softmax.logprob(to_float(row[id]));
      }
    }
  });
}

}  // namespace specdec::draft
