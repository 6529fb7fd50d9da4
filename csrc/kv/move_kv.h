// move_kv: compacts the KV rows of an accepted path, in every layer.
#pragma once

#include "core/dispatch.h"
#include "kv/layer_pools.h"

namespace specdec::kv {

struct MoveKvParams {
  LayerPools pools;
  PageRows rows;
  const int32_t* path;         // [batch, accept_width], tree nodes, 0 first
  const int32_t* num_valid;    // [batch]
  const int32_t* prefix_lens;  // [num_slots]
  const int32_t* slots;        // [batch] or null
  int32_t* status;             // [num_slots] or null
  int64_t batch, accept_width, num_slots;
};

void move_kv(CallStream stream, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table,
             const TensorView& path, const TensorView& num_valid, const TensorView& prefix_lens, const OptTensor& slots,
             const OptTensor& page_refs, const OptTensor& status);

void move_kv_cpu(const MoveKvParams& p);
void move_kv_cuda(const MoveKvParams& p, Stream stream);

// The path of request b to compact: entries 0 .. count - 1, whose rows follow row `before` of its slot.
struct PathToMove {
  int64_t slot, before = 0, count = 0;
  int32_t bits = 0;  // for the slot's status
};

SD_HD PathToMove path_to_move(const MoveKvParams& p, int64_t b) {
  PathToMove path{.slot = slot_of(p.slots, b, p.num_slots)};
  const int64_t count = p.num_valid[b];
  if (path.slot < 0) return path;
  const int32_t status = p.status ? p.status[path.slot] : 0;
  path.before = p.prefix_lens[path.slot];
  if (status & kStalled) return path;
  if (count < 0 || count > p.accept_width || path.before < 0)
    path.bits = kBadLength;
  else
    path.count = count;
  return path;
}

// The move of a path entry, if it needs one. Nonzero bits end the request's moves before it.
struct RowMove {
  KvRow from, to;
  int32_t bits = 0;
  bool needed = false;
};

// Return the move of entry j. An increasing path from 0 has path[j] >= j: sources come after their destinations, so no
// row is overwritten before it has moved.
template <class Divmod>
SD_HD RowMove find_move(const MoveKvParams& p, const Divmod& page_size, const PathToMove& request, const int32_t* path,
                        int64_t j) {
  RowMove move;
  if (j == 0 ? path[0] != 0 : path[j] <= path[j - 1]) {
    move.bits = kBadTree;
  } else if (path[j] != j) {
    move.from = find_row(p.rows, page_size, request.slot, request.before + path[j]);
    move.to = find_own_row(p.rows, page_size, request.slot, request.before + j);
    move.bits = move.from.bits ? move.from.bits : move.to.bits;
    move.needed = move.bits == 0;
  }
  return move;
}

}  // namespace specdec::kv
