// The rules for Hopper (compute capability 9.0). The numbers are measurements on an H200: docs/notebook/attention.md.
//
// First of all, do few (request, KV head, row tile) get a thread-block cluster each? Else a persistent grid walks all
// KV by stream-K: with wgmma for pools of 16 bits; for pools of 8 bits with wgmma that dequantises in registers (few
// rows), or in shared memory (more).
#include <algorithm>

#include "attention/plan_rules.h"

namespace specdec::attention {
namespace {

// So little KV that two warpgroups of a block find no more to do than one.
constexpr int kTokensOfOneWarpgroup = 768;
// So much KV that more clusters share it, and so much that clusters which share it pay even where they take
// num_sms from the next call.
constexpr int kLongTokens = 16384, kVeryLongTokens = 65536;

int64_t tiles_of(int64_t rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

// --- clusters

// Row tile of a cluster:
//
//   16    up to 16 rows; up to 64, where that makes 8 tiles at most; and of 8-bit pools up to 32, or 64 with short KV,
//         where half of the num_sms are enough for all tiles: mma.sync takes 8 bits as they are
//   64    up to 64 rows; and more, where that makes 16 tiles at most, or KV is short and there is a multiprocessor for
//         each of two blocks
//   128   else: a block has a multiprocessor for itself, which is better than more clusters of fewer blocks each
int cluster_tile_rows(const AttentionShape& shape, int64_t max_kv_len, const Device& device) {
  const int64_t rows = shape.rows(), tiles_of_16 = tiles_of(rows, 16);
  if (shape.fp8 && 2 * shape.pairs() * tiles_of_16 <= device.num_sms &&
      (tiles_of_16 <= 2 || (tiles_of_16 <= kMaxRowTiles && max_kv_len <= kShortTokens)))
    return 16;
  if (rows <= 64) return rows <= 16 || shape.pairs() * tiles_of_16 <= 8 ? 16 : 64;
  const int64_t tiles = shape.pairs() * tiles_of(rows, 64);
  return tiles <= 16 || (max_kv_len <= kShortTokens && 2 * tiles <= device.num_sms) ? 64 : 128;
}

// Clusters that share a row tile where its KV is long:
//
//   tiles of 16 rows   clusters
//   1 to 4             8, 4, 2, 2: all of them find num_sms of their own, and so do the next call's; 4 for 3 or
//                      4 tiles of one or two pairs with long KV, which the tiles of a pair read from the L2
//   5 to 7             1
//   8                  2 for 8 pairs with very long KV: they read it faster than one, but disturb the next call where
//                      it is short
//   more               1
int sharing_clusters(const AttentionShape& shape, int64_t max_kv_len, int tile_rows) {
  const int64_t tiles = shape.pairs() * tiles_of(shape.rows(), tile_rows);
  if (tile_rows != 16 || tiles == 0 || tiles > 8 || max_kv_len < kMinSharedTokens) return 1;
  if (tiles == 8) return shape.pairs() == 8 && max_kv_len >= kVeryLongTokens ? 2 : 1;
  if ((tiles == 3 || tiles == 4) && shape.pairs() <= 2 && max_kv_len >= kLongTokens) return 4;
  return static_cast<int>(8 / tiles);
}

// Whether clusters are better than a persistent grid. What they copy and multiply in a given time is less than the
// whole device could, so the fewer they are, the shorter the KV that is left to them:
//
//   clusters of 64 rows                             KV at most
//   up to 16 rows, 8 to 16 clusters                 any: they reach the memory's bandwidth
//   up to 16 rows of 8-bit pools, 8 clusters on     any
//   fewer than 8                                    8192, or any where clusters share
//   8-bit pools, more row tiles                     10240 for 8 to 32, 5120 for more
//   more row tiles, 17 on, pages that are no boxes  any
//   up to 128 rows                                  16384
//   more                                            10240
bool clusters_pay(const AttentionShape& shape, int64_t max_kv_len, const Device& device, int sharing) {
  if (shape.fixed_split || shape.head_dim == 256) return false;
  const int64_t rows = shape.rows(), tiles = tiles_of(rows, 64), clusters = shape.pairs() * tiles;
  // Up to 16 rows, and up to 64 of half as many columns, two blocks are faster than one as long as there is a
  // multiprocessor for each cluster; else there must be one for each of two blocks, of 64 rows or of 128.
  constexpr int64_t kMostTokensOfPairs = 4352;
  const int64_t wide_tiles = tiles_of(rows, 128);
  const bool pairs_fit = !shape.fp8 && max_kv_len <= kMostTokensOfPairs && (rows <= 16 || shape.head_dim == 64);
  const int64_t needed = rows > 64 ? 2 * shape.pairs() * wide_tiles : pairs_fit ? clusters : 2 * clusters;
  if (clusters == 0 || tiles > kMaxRowTiles || needed > device.num_sms) return false;
  if (sharing > 1) return true;
  if (rows <= 16 && clusters >= 8 && (clusters <= 16 || shape.fp8)) return true;
  if (clusters < 8) return max_kv_len <= 8192;
  if (shape.fp8 && tiles > 1) return max_kv_len <= (clusters <= 32 ? 10240 : 5120);
  if (tiles > 1 && clusters > 16 && !shape.boxes) return true;
  return max_kv_len <= (wide_tiles == 1 ? 16384 : 10240);
}

// Blocks of a cluster. Clusters are whole, for which not all of the device has room; with up to 64 rows the blocks of
// two calls are there at once.
int cluster_blocks(const AttentionShape& shape, int64_t max_kv_len, const Device& device, int tile_rows, int sharing) {
  const int64_t tiles = std::max<int64_t>(shape.pairs() * tiles_of(shape.rows(), tile_rows), 1);
  const auto blocks = [&](int64_t num_sms) {
    return static_cast<int>(std::clamp<int64_t>(num_sms / tiles, 2, kMaxClusterBlocks));
  };
  if (sharing > 1) return tiles > 4 ? 6 : kMaxClusterBlocks;
  if (shape.fp8 && tile_rows == 16 && tiles > 16) return 4 * tiles <= device.num_sms ? 6 : 2;
  // With short KV, so few that the next call's blocks have num_sms of their own.
  if (tile_rows == 16 && tiles <= 16 && max_kv_len <= kShortTokens) return blocks(device.num_sms / 2);
  return blocks(device.num_sms * 3 / 4);
}

// --- persistent grids

// wgmma multiplies 64 rows at a time, but even for 16 of them that takes less time than reading their 16-bit KV. 8-bit
// KV is dequantised in registers for up to 32 rows; for up to 64 where one block on each multiprocessor has enough to
// do and KV is not short; in shared memory for more. With fixed_split a row's bits must not depend on its neighbours,
// so neither the kernel nor its row tile depends on their number. Tiles of 128 rows live on boxes of the copy engine:
// where pages are none, some tiles of 64 rows copy them row by row, unless rows are so many that products take longer.
// Two tiles of 64 rows, or three where KV is short, are faster with boxes too, unless KV is long.
Kernel persistent_kernel(const AttentionShape& shape, int64_t max_kv_len, const Device& device) {
  if (!shape.fp8) return Kernel::kWgmma;
  const bool one_block = shape.pairs() < 2 * device.num_sms && max_kv_len > kShortTokens;
  const int most = shape.head_dim < 256 && one_block ? 64 : 32;
  return shape.rows() <= most && !shape.fixed_split ? Kernel::kDequantRegisters : Kernel::kDequantSmem;
}

int persistent_tile_rows(const AttentionShape& shape, int64_t max_kv_len, Kernel kernel) {
  const int64_t rows = shape.rows();
  constexpr int64_t kManyRows = 512;
  const auto narrow_rows = [&]() -> int64_t {  // the most that tiles of 64 have
    if (kernel != Kernel::kWgmma || (shape.boxes && shape.head_dim == 256)) return 64;
    if (!shape.boxes) return kManyRows;
    if (max_kv_len <= kShortTokens) return 192;
    return max_kv_len <= (shape.head_dim == 64 ? kMediumTokens : 8192) ? 128 : 64;
  };
  const bool wide = !shape.fixed_split && rows > narrow_rows();
  if (kernel != Kernel::kDequantRegisters) return wide ? 128 : 64;
  const int largest = shape.head_dim == 256 ? 32 : 64;  // whose sums fit in registers
  return shape.fixed_split || rows > 32 ? largest : rows > 16 ? 32 : 16;
}

// Blocks on a multiprocessor. Two hide more of each other's waiting; where there are fewer than `least` pairs of a
// request and a KV head, one has as much KV on its way and leaves half as many partial results, but not where several
// row tiles of 64 walk the same KV, and where 8 bits are dequantised in shared memory only if KV is short.
int occupancy(const AttentionShape& shape, int64_t max_kv_len, const AttentionPlan& plan, int64_t least) {
  const bool is_long = plan.kernel == Kernel::kDequantSmem && max_kv_len > 8192;
  if (most_blocks_sm90(plan.kernel, shape.head_dim, plan.tile_rows, 1) == 1) return 1;
  const bool in_step = plan.kernel == Kernel::kWgmma && plan.row_tiles > 1;
  return shape.pairs() >= least || is_long || in_step ? 2 : 1;
}

}  // namespace

int most_blocks_sm90(Kernel kernel, int64_t head_dim, int tile_rows, int warpgroups) {
  if (head_dim == 256 || warpgroups == 2) return 1;
  return tile_rows <= (kernel == Kernel::kDequantRegisters ? 32 : 64) ? 2 : 1;
}

AttentionPlan plan_sm90(const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                        const PlanOptions& forced) {
  AttentionPlan plan;
  plan.sharing_clusters = 1;
  const int tile_rows = forced.tile_rows.value_or(cluster_tile_rows(shape, max_kv_len, device));
  const int sharing = forced.sharing_clusters.value_or(sharing_clusters(shape, max_kv_len, tile_rows));
  plan.kernel = forced.kernel.value_or(clusters_pay(shape, max_kv_len, device, sharing)
                                           ? Kernel::kCluster
                                           : persistent_kernel(shape, max_kv_len, device));
  if (plan.kernel == Kernel::kCluster) {
    plan.tile_rows = tile_rows;
    plan.sharing_clusters = sharing;
    plan.cluster_blocks = forced.cluster_blocks.value_or(cluster_blocks(shape, max_kv_len, device, tile_rows, sharing));
    plan.warpgroups = tile_rows == 128 ? 2 : 1;
    plan.blocks_per_sm = tile_rows == 128 ? 1 : 2;
    set_row_tiles(plan, shape);
    return plan;
  }

  plan.tile_rows = forced.tile_rows.value_or(persistent_tile_rows(shape, max_kv_len, plan.kernel));
  set_row_tiles(plan, shape);
  const int num_sms = device.num_sms;
  set_workers(plan, forced.occupancy.value_or(occupancy(shape, max_kv_len, plan, num_sms + 1)), device);
  plan.whole_items = forced.whole_items.value_or(takes_whole_items(plan, shape, max_kv_len));
  // One block has enough 8-bit KV on its way for up to twice as many items, where these are split.
  if (shape.fp8 && !plan.whole_items && !forced.occupancy)
    set_workers(plan, occupancy(shape, max_kv_len, plan, 2 * num_sms), device);
  plan.warpgroups = plan.tile_rows == 128 ? 2 : 1;
  if (plan.kernel == Kernel::kDequantRegisters) {
    const bool two = shape.head_dim < 256 && plan.blocks_per_sm == 1 && max_kv_len > kTokensOfOneWarpgroup;
    plan.warpgroups = forced.warpgroups.value_or(two || plan.tile_rows == 64 ? 2 : 1);
  }
  return plan;
}

}  // namespace specdec::attention
