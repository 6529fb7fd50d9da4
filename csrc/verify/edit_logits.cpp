// edit_logits: argument checks and the CPU implementation.
#include "verify/edit_logits.h"

#include <limits>
#include <vector>

namespace specdec::verify {

void edit_logits(CallStream stream, const TensorView& logits, const TensorView& mask, const TensorView& tokens,
                 const TensorView& kinds, const TensorView& bias, const TensorView& counts, const TensorView& presence,
                 const TensorView& frequency, const TensorView& repetition, const OptTensor& vocab_mask,
                 const OptTensor& slots, const OptTensor& cu_seqlens_q) {
  Check check("edit_logits");
  Dim W{"words"}, K{"tree_nodes"};
  NodeLogitsSizes sizes;
  auto& [B, N, T, V, R] = sizes;
  const bool packed = cu_seqlens_q.has_value();
  sizes.check(check, logits, packed);
  if (packed)
    check.tensor("mask", mask, {T, W}, kInt64);
  else
    check.tensor("mask", mask, {B, N, W}, kInt64);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  check.range("vocab", V, 1, std::numeric_limits<int32_t>::max());
  check.tensor("tokens", tokens, {B, K}, kInt32);
  check.tensor("edits.kinds", kinds, {R}, kInt32);
  check.tensor("edits.bias", bias, {R, V}, kFloat32);
  check.tensor("edits.counts", counts, {R, V}, kInt32);
  check.tensor("edits.presence", presence, {R}, kFloat32);
  check.tensor("edits.frequency", frequency, {R}, kFloat32);
  check.tensor("edits.repetition", repetition, {R}, kFloat32);
  const int64_t vocab_words = (V + 31) / 32;
  if (packed)
    check.tensor("vocab_mask", vocab_mask, {T, vocab_words}, kInt32);
  else
    check.tensor("vocab_mask", vocab_mask, {B, N, vocab_words}, kInt32);
  check.slots(slots, B, R);
  check.range("num_nodes", packed ? T : N, 0, kMaxEditedNodes);
  if (B == 0) return;

  const EditLogitsParams params{
      .logits = sizes.of(logits, slots, cu_seqlens_q),
      .mask = mask.data<const int64_t>(),
      .tokens = tokens.data<const int32_t>(),
      .kinds = kinds.data<const int32_t>(),
      .bias = bias.data<const float>(),
      .counts = counts.data<const int32_t>(),
      .presence = presence.data<const float>(),
      .frequency = frequency.data<const float>(),
      .repetition = repetition.data<const float>(),
      .vocab_mask = data_or_null<const int32_t>(vocab_mask),
      .words = W,
      .tree_nodes = K,
      .vocab_words = vocab_words,
  };
  SD_DISPATCH(check, stream, edit_logits, params);
}

void edit_logits_cpu(const EditLogitsParams& p) {
  with_float_type(p.logits.dtype, [&]<class T>() {
    for (int64_t b = 0; b < p.logits.batch; ++b) {
      const EditedRequest r = edited_request(p, b);
      if (r.kinds == 0) continue;
      std::vector<bool> is_drafted(p.logits.vocab);
      for (int64_t i = 1; i < p.tree_nodes && (r.kinds & kEditPenalties); ++i) {
        const int64_t v = p.tokens[b * p.tree_nodes + i];
        if (v >= 0 && v < p.logits.vocab) is_drafted[v] = true;
      }
      for (int64_t v = 0; v < p.logits.vocab; ++v) {
        if (!is_drafted[v] && !is_edited(p, r, v)) continue;
        for (int64_t node = 0; node < r.nodes.count; ++node) edit_logit<T>(p, r, node, v);
      }
      if (!(r.kinds & kEditMask)) continue;
      for (int64_t node = 0; node < r.nodes.count; ++node) {
        T* row = p.logits.row<T>(r.b, r.nodes, node);
        for (int64_t v = 0; v < p.logits.vocab; ++v)
          if (forbidden(p, r, node, v >> 5) >> (v & 31) & 1) row[v] = from_float<T>(-INFINITY);
      }
    }
  });
}

}  // namespace specdec::verify
