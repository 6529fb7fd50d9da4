// Rules for Hopper (compute capability 9.0): wgmma for rows of 512 + 64 elements of 16 or 8 bits, from 1 row on; the
// rules of plan_sm80.cpp for the rest.
//
// A persistent grid of one block per SM. A worker is 1 to 5 blocks that read the same KV, one row tile of 64 each
// (best_row_tiles()). Workers take even shares of all KV (split), or with short KV whole items if a quarter of the
// workers have work to the end (whole).
#include <algorithm>

#include "mla/plan_rules.h"

namespace specdec::mla {
namespace {

constexpr int kTileRows = 64, kTileTokens = 64, kMaxRowTiles = 5;
// Up to this much KV, storing and merging partial results takes longer than splitting saves.
constexpr int64_t kShortTokens = 1088;

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
int64_t workers_of(const Device& device, int64_t row_tiles) { return std::max<int64_t>(device.num_sms / row_tiles, 1); }

// Return the row tiles of a worker for requests of `tiles` row tiles: those that leave the fewest items to a worker,
// since an item takes as long however many of its blocks' row tiles exist. Items are no more than with 4 row tiles,
// because each reads the KV again. So 5 tiles are 1 item of 5, 7 tiles 2 items of 4, 9 tiles 3 items of 3.
int64_t best_row_tiles(int64_t tiles, const Device& device) {
  const int64_t most_items = divide_up(tiles, 4);
  int64_t best = divide_up(tiles, most_items);
  for (int64_t row_tiles = best + 1; row_tiles <= kMaxRowTiles; ++row_tiles)
    if (divide_up(tiles, row_tiles) * workers_of(device, best) < divide_up(tiles, best) * workers_of(device, row_tiles))
      best = row_tiles;
  return best;
}

}  // namespace

bool can_use_wgmma(const MlaShape& shape, const Device& device) {
  return device.has_wgmma && shape.tensor_cores && shape.latent_dim == 512 && shape.width == 576 && !shape.listed;
}

MlaPlan plan_sm90(const MlaShape& shape, int64_t max_kv_len, const Device& device, const PlanOptions& forced) {
  MlaPlan plan{.kernel = Kernel::kWgmma, .tile_rows = kTileRows, .tile_tokens = kTileTokens};
  const int64_t tiles = std::max<int64_t>(divide_up(shape.rows(), kTileRows), 1);
  plan.row_tiles = static_cast<int>(best_row_tiles(tiles, device));
  plan.workers = static_cast<int>(workers_of(device, plan.row_tiles));
  const int64_t items = divide_up(tiles, plan.row_tiles);  // of a request
  const bool is_short = max_kv_len <= kShortTokens && 4 * shape.batch * items >= plan.workers;
  plan.whole_items = !shape.fixed_split && items == 1 && !shape.packed && forced.whole_items.value_or(is_short);
  if (shape.fixed_split) set_splits(plan, shape, max_kv_len, 0, forced);
  return plan;
}

}  // namespace specdec::mla
