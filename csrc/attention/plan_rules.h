// The rules per architecture and what they share; private to plan.cpp, plan_sm80.cpp and plan_sm90.cpp.
#pragma once

#include "attention/plan.h"

namespace specdec::attention {

// The fields that the name of a forced plan sets; the rules fill in the rest.
struct PlanOptions {
  std::optional<Kernel> kernel;
  std::optional<int> tile_rows, occupancy, warpgroups, cluster_blocks, sharing_clusters;
  std::optional<bool> whole_items;
};

AttentionPlan plan_sm80(const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                        const PlanOptions& forced);
AttentionPlan plan_sm90(const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                        const PlanOptions& forced);

// Return how many blocks of the kernel fit on an SM at once.
int max_blocks_per_sm80(int64_t head_dim, const Device& device);
int max_blocks_per_sm90(Kernel kernel, int64_t head_dim, int tile_rows, int warpgroups);

// Lengths up to which splitting KV does not pay. Up to kShortTokens, splitting in two and merging takes longer than
// reading the KV. Up to kMediumTokens, splitting a request that is long among short ones is not worth it.
constexpr int kShortTokens = 1088, kMediumTokens = 2304;

// Set the fields that follow from the kernel and its tile_rows.
void set_row_tiles(AttentionPlan& plan, const AttentionShape& shape);
// Set the size of a persistent grid with this many blocks per SM: all blocks have to be co-resident.
void set_workers(AttentionPlan& plan, int blocks_per_sm, const Device& device);
// Return whether workers take whole items, without reading lengths: if KV is short, and a quarter of the workers, or
// all but a few, stay busy to the end. Uneven work matters little, because all workers share the memory bandwidth, and
// one alone can use several times its share.
bool use_whole_items(const AttentionPlan& plan, const AttentionShape& shape, int64_t max_kv_len);

}  // namespace specdec::attention
