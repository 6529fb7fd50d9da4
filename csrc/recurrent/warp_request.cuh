// A request as a warp reads it, in few rounds of loads and without barriers.
#pragma once

#include "core/warp.cuh"
#include "recurrent/pending.h"

namespace specdec::recurrent {

// Return the rows of request b, 0 to batch.
__device__ __forceinline__ Request load_rows_of_request(const PendingPathsView& p, const PackedRowsView& r, int64_t b) {
  const int32_t end = b < p.batch ? r.cu_seqlens[b + 1] : static_cast<int32_t>(r.rows);
  return rows_of_request(r, b, r.cu_seqlens[b], end);
}

// Nodes of the pending path and rows of the mask, spread over the lanes: those of the lane, and those 32 later.
struct WarpRequest {
  Request request;  // its path's bits tell of bad lengths alone
  uint64_t seen[2];
  int32_t nodes[2];

  // Start to load rows of the mask, once the request has its rows.
  __device__ void load_mask(const PackedRowsView& r) {
    const int lane = lane_id();
#pragma unroll
    for (int n = 0; n < 2; ++n)
      seen[n] = r.mask != nullptr && lane + n * kWarp < request.rows ? mask_word(r, request, lane + n * kWarp) : 0;
  }

  // Load what memory says of the slot of request b.
  __device__ void load_slot(const PendingPathsView& p, const PackedRowsView& r, int64_t b) {
    const int64_t slot = b < p.batch ? slot_of(p.slots, b, p.num_slots) : -1;
    const int lane = lane_id();
#pragma unroll
    for (int n = 0; n < 2; ++n)
      nodes[n] = slot >= 0 && lane + n * kWarp < p.path_width ? p.nodes[slot * p.path_width + lane + n * kWarp] : 0;
    if (slot >= 0) set_path(request, p, r, slot, load_slot_words(p, r.prefix_lens, slot));
  }

  // Return node j of the pending path, the same j in all lanes.
  __device__ int32_t node(int j) const { return __shfl_sync(kFullMask, j < kWarp ? nodes[0] : nodes[1], j % kWarp); }

  // Return the nodes that row i sees, itself included, the same i in all lanes.
  __device__ uint64_t seen_of(int i) const { return __shfl_sync(kFullMask, i < kWarp ? seen[0] : seen[1], i % kWarp); }

  // Return whether the pending path or the mask is bad, in all lanes.
  __device__ bool is_bad(const PendingPathsView& p, const PackedRowsView& r) const {
    const int lane = lane_id();
    const int32_t last = __shfl_sync(kFullMask, nodes[0], kWarp - 1);
    bool is_bad = false;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = lane + n * kWarp;
      const int32_t before = __shfl_up_sync(kFullMask, nodes[n], 1);
      is_bad |= i < request.path.count && is_bad_entry(p, nodes[n], lane > 0 ? before : n == 0 ? -1 : last);
      if (r.mask == nullptr) continue;
      const uint64_t ancestors = seen[n] & low_bits(i);
      const int parent = ancestors != 0 ? highest_bit(ancestors) : 0;
      const uint64_t low = __shfl_sync(kFullMask, seen[0], parent % kWarp);
      const uint64_t high = __shfl_sync(kFullMask, seen[1], parent % kWarp);
      if (i >= request.rows) continue;
      is_bad |= is_bad_word(seen[n], i, [&](int32_t j) { return j < kWarp ? low : high; });
      is_bad |= has_more_bits(r, request, i);
    }
    return __any_sync(kFullMask, is_bad);
  }
};

}  // namespace specdec::recurrent
