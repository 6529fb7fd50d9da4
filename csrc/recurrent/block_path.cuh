// A block's check of a pending path.
#pragma once

#include "core/cuda.cuh"
#include "recurrent/pending.h"

namespace specdec::recurrent {

// Return whether an entry of a request's pending path is bad. All threads of the block call it, kMaxNodes at least.
__device__ inline bool is_bad_path(const PendingPathsView& p, const PendingPath& path, int thread) {
  bool is_bad = false;
  if (path.slot >= 0 && path.bits == 0) is_bad = thread < path.count && is_bad_entry(p, path, thread);
  return __syncthreads_or(is_bad);
}

}  // namespace specdec::recurrent
