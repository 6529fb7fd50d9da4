// move_kv: brings the KV rows of an accepted path together, in every layer.
#pragma once

#include "core/dispatch.h"
#include "kv/page_rows.h"

namespace specdec {

struct MoveKvParams {
  PoolView k_pools, v_pools;  // of layer 0; the others this many bytes apart:
  int64_t k_layer_stride, v_layer_stride;
  PageRows rows;
  const int32_t* path;             // [batch, accept_width], tree nodes, 0 first
  const int32_t* num_valid;        // [batch]
  const int32_t* seq_lens_before;  // [num_slots]
  const int32_t* slots;            // [batch] or null
  int32_t* status;                 // [num_slots] or null
  int64_t batch, accept_width, num_slots, layers, heads;
  int64_t head_bytes, unit;  // of one head; what it is copied in
};

void move_kv(CallStream stream, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table,
             const TensorView& path, const TensorView& num_valid, const TensorView& seq_lens_before,
             const OptTensor& slots, const OptTensor& page_refs, const OptTensor& status);

void move_kv_cpu(const MoveKvParams& p);
void move_kv_cuda(const MoveKvParams& p, Stream stream);

// The moves of one request, in order: call next() until it returns false, then see `bits`.
template <class Divmod>
struct RowMoves {
  const MoveKvParams& p;
  const Divmod& divmod;
  int64_t slot;
  const int32_t* path;
  int64_t before = 0, count = 0, j = 0;
  KvRow from, to;    // of the move at hand
  int32_t bits = 0;  // for the slot's status

  SD_HD RowMoves(const MoveKvParams& params, const Divmod& page_size, int64_t b)
      : p(params),
        divmod(page_size),
        slot(slot_of(params.slots, b, params.num_slots)),
        path(params.path + b * params.accept_width) {
    if (slot < 0 || (p.status && (p.status[slot] & kStalled))) return;
    before = p.seq_lens_before[slot];
    count = p.num_valid[b];
    if (count < 0 || count > p.accept_width || before < 0)
      stop(kBadLength);
    else if (count > 0 && path[0] != 0)
      stop(kBadTree);
  }

  // A path that rises from 0 has path[j] >= j: sources lie behind their destinations, so no row is overwritten before
  // it has moved.
  SD_HD bool next() {
    while (++j < count) {
      if (path[j] <= path[j - 1]) return stop(kBadTree);
      if (path[j] == j) continue;
      from = find_row(p.rows, divmod, slot, before + path[j]);
      if (from.bits) return stop(from.bits);
      to = find_own_row(p.rows, divmod, slot, before + j);
      return to.bits ? stop(to.bits) : true;
    }
    return false;
  }

 private:
  SD_HD bool stop(int32_t why) {
    bits = why;
    count = 0;
    return false;
  }
};

}  // namespace specdec
