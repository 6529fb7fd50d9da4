// Rules for mma.sync: compute capability 8.0 and later.
//
//   rows of an item     tile_rows
//   up to 16            16
//   up to 32            32
//   more                64
//
// or less, as shared memory allows. With fixed_split the tile is always the largest: a row's bits must not depend on
// its neighbors, so the tile must not depend on their number.
#include "mla/plan_rules.h"

namespace specdec::mla {

int largest_tile_sm80(const Device& device) {
  const int kib = device.shared_bytes_per_block / 1024;
  return kib >= 156 ? 64 : kib >= 116 ? 32 : kib >= 96 ? 16 : 0;
}

MlaPlan plan_sm80(const MlaShape& shape, int64_t max_kv_len, const Device& device, const PlanOptions& forced) {
  const int largest = largest_tile_sm80(device);
  const int wanted = shape.fixed_split || shape.rows() > 32 ? 64 : shape.rows() > 16 ? 32 : 16;
  MlaPlan plan{.kernel = Kernel::kMma, .tile_tokens = 32};
  plan.tile_rows = forced.tile_rows.value_or(wanted < largest ? wanted : largest);
  const int blocks_per_sm = plan.tile_rows < 64 && device.shared_bytes_per_sm >= 228 * 1024 ? 2 : 1;
  set_splits(plan, shape, max_kv_len, int64_t{device.num_sms} * blocks_per_sm, forced);
  return plan;
}

}  // namespace specdec::mla
