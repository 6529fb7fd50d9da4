// Logits of the requests' nodes, which edit_logits and mask_stops change in place: num_nodes rows per request, or
// packed rows without gaps.
#pragma once

#include "core/check.h"
#include "core/packed_rows.h"
#include "core/slots.h"

namespace specdec::verify {

struct NodeLogits {
  void* data;  // [batch, num_nodes, vocab] or packed [num_rows, vocab], with the strides below, in elements
  Dtypes dtype;
  int64_t batch_stride, node_stride;
  const int32_t* slots;         // [batch] or null
  const int32_t* cu_seqlens_q;  // [batch + 1] or null: row offsets of packed rows
  int64_t batch, num_nodes, num_rows, vocab, num_slots;

  SD_HD int64_t slot(int64_t b) const { return slot_of(slots, b, num_slots); }

  // Return the rows of request b's nodes.
  SD_HD RowRange nodes(int64_t b) const {
    return cu_seqlens_q ? packed_rows(cu_seqlens_q, b, num_rows) : RowRange{b * num_nodes, num_nodes};
  }

  // Return the logits of one of request b's nodes.
  template <class T>
  SD_HD T* row(int64_t b, RowRange nodes, int64_t node) const {
    const int64_t root = cu_seqlens_q ? nodes.first * node_stride : b * batch_stride;
    return static_cast<T*>(data) + root + node * node_stride;
  }
};

// Sizes of such logits, shared with other arguments' checks.
struct NodeLogitsSizes {
  Dim batch{"batch"}, nodes{"num_nodes"}, rows{"rows"}, vocab{"vocab"}, slots{"num_slots"};

  void check(Check& check, const TensorView& logits, bool packed) {
    if (packed)
      check.strided_output("logits", logits, {rows, vocab}, kFloats);
    else
      check.strided_output("logits", logits, {batch, nodes, vocab}, kFloats);
  }

  // Build NodeLogits from the sizes checked so far.
  NodeLogits of(const TensorView& logits, const OptTensor& slots_of_rows, const OptTensor& cu_seqlens_q) const {
    const bool packed = cu_seqlens_q.has_value();
    return {.data = logits.data<void>(),
            .dtype = dtype_of(logits),
            .batch_stride = packed ? 0 : logits.stride(0),
            .node_stride = logits.stride(packed ? 0 : 1),
            .slots = data_or_null<const int32_t>(slots_of_rows),
            .cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q),
            .batch = batch,
            .num_nodes = nodes,
            .num_rows = rows,
            .vocab = vocab,
            .num_slots = slots};
  }
};

}  // namespace specdec::verify
