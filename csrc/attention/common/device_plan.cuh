// DevicePlan: the AttentionPlan of a call in the form its kernels take, with precomputed fast divisors.
#pragma once

#include <cutlass/fast_math.h>

#include "attention/attention_call.h"
#include "attention/plan.h"

namespace specdec::attention {

// Start with fields copied from AttentionPlan; see there.
struct DevicePlan {
  int tile_rows;
  int row_tiles;
  int blocks_per_sm;
  int workers;
  int cluster_blocks;
  bool whole_items;
  bool two_warpgroups;
  cutlass::FastDivmod tile_tokens;  // divisor: KV rows of a KV tile
  cutlass::FastDivmod gqa_group;    // divisor: q_heads / kv_heads
  cutlass::FastDivmod split_tiles;  // divisor: KV tiles per split with fixed_split; else 1
  cutlass::FastDivmod page_size;    // divisor: KV rows of a page
  int sharing_clusters;
};

inline DevicePlan make_device_plan(const AttentionPlan& plan, const AttentionCall& p) {
  const auto divide_by = [](int64_t divisor) { return cutlass::FastDivmod(static_cast<int>(divisor)); };
  return {.tile_rows = plan.tile_rows,
          .row_tiles = plan.row_tiles,
          .blocks_per_sm = plan.blocks_per_sm,
          .workers = plan.workers,
          .cluster_blocks = plan.cluster_blocks,
          .whole_items = plan.whole_items,
          .two_warpgroups = plan.warpgroups == 2,
          .tile_tokens = divide_by(plan.tile_tokens),
          .gqa_group = divide_by(p.q_heads / p.kv_heads),
          .split_tiles = divide_by(p.fixed_split ? p.fixed_split / plan.tile_tokens : 1),
          .page_size = divide_by(p.rows.page_size),
          .sharing_clusters = plan.sharing_clusters};
}

// Locate row n among the packed rows of a request and KV head: query row n / G, head n % G of its GQA group.
struct QueryRow {
  int row;   // query row of the request
  int head;  // among all query heads
};
__device__ __forceinline__ QueryRow query_row(const DevicePlan& plan, int kv_head, int n) {
  QueryRow at;
  plan.gqa_group(at.row, at.head, n);
  at.head += kv_head * plan.gqa_group.divisor;
  return at;
}

}  // namespace specdec::attention
