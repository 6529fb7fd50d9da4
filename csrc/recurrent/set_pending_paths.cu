// Make accepted paths pending.
//
// One warp per request, 4 per block: lanes copy the entries of the path, once a vote has found it valid. Reads and
// writes a few dozen bytes per request.
#include "core/warp.cuh"
#include "recurrent/set_pending_paths.h"

namespace specdec::recurrent {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) set_pending_paths_kernel(SetPendingPathsParams p) {
  begin_kernel();
  const int64_t b = int64_t{blockIdx.x} * (kThreads / kWarp) + warp_id();
  if (b >= p.batch) return;
  const int64_t slot = slot_to_set(p, b);
  if (slot < 0) return;
  const int32_t* path = p.path + b * p.accept_width;
  const int64_t count = p.num_valid[b];
  int32_t bits = count < 0 || count > p.accept_width ? kBadLength : 0;
  for (int64_t first = 0; bits == 0 && first < count; first += kWarp) {
    const int64_t j = first + lane_id();
    if (__any_sync(kFullMask, j < count && breaks_path(path, j))) bits = kBadTree;
  }
  if (bits == 0)
    for (int64_t j = lane_id(); j < count; j += kWarp) p.nodes[slot * p.accept_width + j] = path[j];
  if (lane_id() != 0) return;
  p.num_nodes[slot] = bits == 0 ? static_cast<int32_t>(count) : 0;
  p.parity[slot] = (p.parity[slot] & 1) ^ 1;
  if (bits) set_status(p.status, slot, bits);
}

}  // namespace

void set_pending_paths_cuda(const SetPendingPathsParams& p, Stream stream) {
  constexpr int kRequests = kThreads / kWarp;
  launch("set_pending_paths", set_pending_paths_kernel,
         {.grid = grid_x("set_pending_paths", (p.batch + kRequests - 1) / kRequests), .threads = kThreads}, stream, p);
}

}  // namespace specdec::recurrent
