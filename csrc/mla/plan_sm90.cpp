// Rules for Hopper (compute capability 9.0): wgmma for 16-bit rows of 512 + 64 elements, from 1 row on; the rules of
// plan_sm80.cpp for the rest.
//
// A persistent grid of one block per SM. A worker is 1 to 4 blocks that read the same KV, one row tile of 64 each; as
// many as the rows of an item need, evenly over items of at most 4 row tiles. Workers take even shares of all KV
// (split), or with short KV whole items if a quarter of the workers have work to the end (whole).
#include <algorithm>

#include "mla/plan_rules.h"

namespace specdec::mla {
namespace {

constexpr int kTileRows = 64, kTileTokens = 64, kMaxRowTiles = 4;
// Up to this much KV, storing and merging partial results takes longer than splitting saves.
constexpr int64_t kShortTokens = 1088;

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

}  // namespace

bool can_use_wgmma(const MlaShape& shape, const Device& device) {
  return device.has_wgmma && shape.tensor_cores && shape.latent_dim == 512 && shape.width == 576 &&
         shape.format == RowFormat::kAsQueries && !shape.listed;
}

MlaPlan plan_sm90(const MlaShape& shape, int64_t max_kv_len, const Device& device, const PlanOptions& forced) {
  MlaPlan plan{.kernel = Kernel::kWgmma, .tile_rows = kTileRows, .tile_tokens = kTileTokens};
  const int64_t tiles = std::max<int64_t>(divide_up(shape.rows(), kTileRows), 1);
  const int64_t items = divide_up(tiles, kMaxRowTiles);  // of a request
  plan.row_tiles = static_cast<int>(divide_up(tiles, items));
  plan.workers = std::max(device.num_sms / plan.row_tiles, 1);
  const bool is_short = max_kv_len <= kShortTokens && 4 * shape.batch * items >= plan.workers;
  plan.whole_items = !shape.fixed_split && items == 1 && !shape.packed && forced.whole_items.value_or(is_short);
  if (shape.fixed_split) set_splits(plan, shape, max_kv_len, 0, forced);
  return plan;
}

}  // namespace specdec::mla
