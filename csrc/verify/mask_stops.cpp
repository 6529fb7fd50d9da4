// mask_stops: argument checks and the CPU implementation.
#include "verify/mask_stops.h"

namespace specdec::verify {

void mask_stops(CallStream stream, const TensorView& logits, const TensorView& positions, const TensorView& stop_tokens,
                const TensorView& stops_from, const OptTensor& slots, const OptTensor& cu_seqlens_q) {
  Check check("mask_stops");
  Dim M{"max_stops"};
  NodeLogitsSizes sizes;
  auto& [B, N, T, V, R] = sizes;
  const bool packed = cu_seqlens_q.has_value();
  sizes.check(check, logits, packed);
  if (packed)
    check.tensor("positions", positions, {T}, kInt32);
  else
    check.tensor("positions", positions, {B, N}, kInt32);
  check.packed("cu_seqlens_q", cu_seqlens_q, B);
  check.tensor("stop_tokens", stop_tokens, {R, M}, kInt32);
  check.tensor("stops_from", stops_from, {R}, kInt32);
  check.slots(slots, B, R);
  check.range("num_nodes * max_stops", (packed ? T : N) * M, 0, INT32_MAX);  // one block counts them in 32 bits
  if (B == 0) return;

  const MaskStopsParams params{
      .logits = sizes.of(logits, slots, cu_seqlens_q),
      .positions = positions.data<const int32_t>(),
      .stop_tokens = stop_tokens.data<const int32_t>(),
      .stops_from = stops_from.data<const int32_t>(),
      .max_stops = M,
  };
  SD_DISPATCH(check, stream, mask_stops, params);
}

void mask_stops_cpu(const MaskStopsParams& p) {
  with_float_type(p.logits.dtype, [&]<class T>() {
    for (int64_t b = 0; b < p.logits.batch; ++b) {
      const int64_t slot = slot_with_minimum(p, b);
      const RowRange nodes = p.logits.nodes(b);
      for (int64_t i = 0; slot >= 0 && i < nodes.count * p.max_stops; ++i)
        mask_stop<T>(p, b, slot, nodes, i / p.max_stops, i % p.max_stops);
    }
  });
}

}  // namespace specdec::verify
