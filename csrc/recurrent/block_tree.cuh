// A block's check of a pending path and a mask.
#pragma once

#include "core/cuda.cuh"
#include "recurrent/pending.h"

namespace specdec::recurrent {

// Return whether a request's pending path or mask is bad. All threads of the block call it, kMaxNodes at least; `r` and
// `request` are null where there are no rows.
__device__ inline bool is_bad_tree(const PendingPathsView& p, const PackedRowsView* r, const PendingPath& path,
                                   const Request* request, int thread) {
  bool is_bad = false;
  if (path.slot >= 0 && path.bits == 0) {
    is_bad = thread < path.count && is_bad_entry(p, path, thread);
    if (r != nullptr && r->mask != nullptr && thread < request->rows) is_bad |= is_bad_mask_row(*r, *request, thread);
  }
  return __syncthreads_or(is_bad);
}

}  // namespace specdec::recurrent
