// Rules for mma.sync: compute capability 8.0 and later, except Hopper.
//
//   rows of a KV head   tile_rows
//   up to 16            16
//   up to 32            32
//   more                64; 32 with head_dim 256, the largest whose accumulators fit in registers
//
// With fixed_split the tile is always the largest: a row's bits must not depend on its neighbors, so the tile must not
// depend on their number.
#include "attention/plan_rules.h"

namespace specdec::attention {

int max_blocks_per_sm80(int64_t head_dim, const Device& device) {
  return head_dim < 256 && device.shared_bytes_per_sm >= 212 * 1024 ? 2 : 1;
}

AttentionPlan plan_sm80(const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                        const PlanOptions& forced) {
  const int64_t rows = shape.rows();
  const int largest = shape.head_dim == 256 ? 32 : 64;
  AttentionPlan plan{.kernel = Kernel::kMma};
  plan.tile_rows = forced.tile_rows.value_or(shape.fixed_split || rows > 32 ? largest : rows > 16 ? 32 : 16);
  plan.sharing_clusters = plan.warpgroups = 1;
  set_row_tiles(plan, shape);
  // Two blocks hide more of each other's latency than one.
  set_workers(plan, forced.occupancy.value_or(max_blocks_per_sm80(shape.head_dim, device)), device);
  plan.whole_items = forced.whole_items.value_or(use_whole_items(plan, shape, max_kv_len));
  return plan;
}

}  // namespace specdec::attention
