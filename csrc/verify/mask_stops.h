// mask_stops: set the logits of stop tokens to -inf at nodes before a request's minimum length, in place.
#pragma once

#include "core/dispatch.h"
#include "core/floats.h"
#include "verify/node_logits.h"

namespace specdec::verify {

struct MaskStopsParams {
  NodeLogits logits;
  const int32_t* positions;    // [batch, num_nodes] or packed [num_rows]: positions of the nodes' tokens
  const int32_t* stop_tokens;  // [num_slots, max_stops], -1 for none
  const int32_t* stops_from;   // [num_slots]: first position at which a stop token may occur; <= 0: anywhere
  int64_t max_stops;
};

void mask_stops(CallStream stream, const TensorView& logits, const TensorView& positions, const TensorView& stop_tokens,
                const TensorView& stops_from, const OptTensor& slots, const OptTensor& cu_seqlens_q);

void mask_stops_cpu(const MaskStopsParams& p);
void mask_stops_cuda(const MaskStopsParams& p, Stream stream);

// Return the slot of row b if it has a minimum length, else -1.
SD_HD int64_t slot_with_minimum(const MaskStopsParams& p, int64_t b) {
  const int64_t slot = p.logits.slot(b);
  return slot >= 0 && p.stops_from[slot] > 0 ? slot : -1;
}

// Mask stop token m of a slot at one of row b's nodes.
template <class T>
SD_HD void mask_stop(const MaskStopsParams& p, int64_t b, int64_t slot, RowRange nodes, int64_t node, int64_t m) {
  const int32_t token = p.stop_tokens[slot * p.max_stops + m];
  const bool early = int64_t{p.positions[nodes.first + node]} + 1 < p.stops_from[slot];
  if (!early || token < 0 || token >= p.logits.vocab) return;
  p.logits.row<T>(b, nodes, node)[token] = from_float<T>(-INFINITY);
}

}  // namespace specdec::verify
