// The plan of a call as its kernels use it: with divisors prepared for the device.
#pragma once

#include <cutlass/fast_math.h>

#include "attention/plan.h"
#include "attention/tree_attention.h"

namespace specdec::attention {

// The first fields are those of AttentionPlan.
struct DevicePlan {
  int tile_rows;
  int row_tiles;
  int blocks_per_sm;
  int workers;
  int cluster_blocks;
  bool whole_items;
  bool two_warpgroups;
  cutlass::FastDivmod tile_tokens;  // divides by the KV rows of a KV tile
  cutlass::FastDivmod gqa_group;    // by q_heads / kv_heads
  cutlass::FastDivmod split_tiles;  // by the KV tiles of a split with fixed_split; else by 1
  cutlass::FastDivmod page_size;    // by the KV rows of a page
  int sharing_clusters;
};

inline DevicePlan device_plan_of(const AttentionPlan& plan, const TreeAttentionParams& p) {
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

// Where row n of all the rows of a request and KV head is: query row n / G, head n % G of its GQA group.
struct QueryRow {
  int row;   // of the request
  int head;  // of all query heads
};
__device__ __forceinline__ QueryRow query_row(const DevicePlan& plan, int kv_head, int n) {
  QueryRow at;
  plan.gqa_group(at.row, at.head, n);
  at.head += kv_head * plan.gqa_group.divisor;
  return at;
}

}  // namespace specdec::attention
