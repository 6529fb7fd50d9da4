// The rules of each machine, and what they share. plan.cpp alone calls them.
#pragma once

#include "attention/plan.h"

namespace specdec::attention {

// What the name of a forced plan says; the rules fill in the rest.
struct PlanOptions {
  std::optional<Kernel> kernel;
  std::optional<int> tile_rows, occupancy, warpgroups, cluster_blocks, sharing_clusters;
  std::optional<bool> whole_items;
};

AttentionPlan plan_sm80(const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                        const PlanOptions& forced);
AttentionPlan plan_sm90(const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                        const PlanOptions& forced);

// Blocks of the kernel that fit on a multiprocessor at once.
int most_blocks_sm80(int64_t head_dim, const Device& device);
int most_blocks_sm90(Kernel kernel, int64_t head_dim, int tile_rows, int warpgroups);

// So little KV that splitting it in two and merging takes longer than reading it; and so little that a request of that
// length among short ones is not worth splitting.
constexpr int kShortTokens = 1088, kMediumTokens = 2304;

// The kernel and its row tile are chosen: fills in what follows from them.
void set_row_tiles(AttentionPlan& plan, const AttentionShape& shape);
// The persistent grid that has so many blocks on each multiprocessor: all of them have to run at once.
void set_workers(AttentionPlan& plan, int blocks_per_sm, const Device& device);
// Whether workers take whole items, without a look at lengths: where KV is short, and a quarter of the workers, or all
// but a few, are busy to the end. All share the memory's bandwidth, of which one alone can use several times its share,
// so that it matters little who has more to do.
bool takes_whole_items(const AttentionPlan& plan, const AttentionShape& shape, int64_t max_kv_len);

}  // namespace specdec::attention
