// set_pending_paths: makes the accepted paths of a round pending, for all recurrent layers of a model.
#pragma once

#include "core/dispatch.h"
#include "recurrent/pending.h"

namespace specdec::recurrent {

struct SetPendingPathsParams {
  int32_t* nodes;            // [num_slots, accept_width]
  int32_t* num_nodes;        // [num_slots]
  int32_t* parity;           // [num_slots]
  const int32_t* path;       // [batch, accept_width], tree nodes, 0 first
  const int32_t* num_valid;  // [batch]
  const int32_t* slots;      // [batch] or null
  int32_t* status;           // [num_slots] or null
  int64_t batch, accept_width, num_slots;
};

void set_pending_paths(CallStream stream, const TensorView& nodes, const TensorView& num_nodes,
                       const TensorView& parity, const TensorView& path, const TensorView& num_valid,
                       const OptTensor& slots, const OptTensor& status);

void set_pending_paths_cpu(const SetPendingPathsParams& p);
void set_pending_paths_cuda(const SetPendingPathsParams& p, Stream stream);

// Return the slot that row b sets, or -1.
SD_HD int64_t slot_to_set(const SetPendingPathsParams& p, int64_t b) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  return slot >= 0 && p.status != nullptr && (p.status[slot] & kStalled) ? -1 : slot;
}

// Return whether entry j of a path is not the root, or does not come after the entry before it.
SD_HD bool breaks_path(const int32_t* path, int64_t j) { return j == 0 ? path[0] != 0 : path[j] <= path[j - 1]; }

}  // namespace specdec::recurrent
