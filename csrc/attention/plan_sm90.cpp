// Rules for Hopper (compute capability 9.0). The thresholds were measured on an H200: docs/tried.md.
//
// The decision, in plan_sm90() at the end of this file:
//
//   1. use_clusters()?       kCluster: a thread-block cluster per request, KV head and row tile. For few such tiles
//                            and KV that is not too long. Row tile: cluster_tile_rows().
//   2. else a persistent grid with stream-K (persistent_kernel()); row tile: persistent_tile_rows()
//        16-bit pools        kWgmma
//        FP8, few rows       kDequantRegisters
//        FP8, more rows      kDequantSmem
//
// Terms: rows = query rows x GQA group size; pairs = requests x KV heads; tiles = pairs x ceil(rows / tile_rows).
//
// Example: batch 4, 32 query rows, 32 query heads, 8 KV heads, head_dim 128, 8192 16-bit KV rows, 132 SMs. rows = 128,
// pairs = 32. In use_clusters(): 2 x 32 blocks of 128 rows <= 132 SMs, one 128-row tile, KV <= 16384: clusters. In
// cluster_tile_rows(): 64 tiles of 64 rows are too many: 128. In cluster_blocks(): 132 x 3/4 / 32 = 3. The plan is
// sm90.cluster.128.blocks3.sharing1. specdec_kernels.attention_plan(...) evaluates these rules from Python, on any
// machine.
#include <algorithm>

#include "attention/plan_rules.h"

namespace specdec::attention {
namespace {

// Up to this much KV, two warpgroups of a block have no more to do than one.
constexpr int kMaxOneWarpgroupTokens = 768;
// From kLongTokens on, more clusters share a row tile. From kVeryLongTokens on, sharing pays off even though the
// clusters take SMs from the next call.
constexpr int kLongTokens = 16384, kVeryLongTokens = 65536;

int64_t tiles_of(int64_t rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

// --- clusters

// Return the row tile of a cluster:
//
//   16    up to 16 rows; up to 64 rows if that makes at most 8 tiles; with FP8 pools also up to 32 rows, or 64 with
//         short KV, if half of the SMs are enough for all tiles: mma.sync takes FP8 as stored
//   64    up to 64 rows; more if that makes at most 16 tiles, or if KV is short and each of two blocks has an SM
//   128   else: a block has an SM to itself, which is better than more clusters of fewer blocks each; not with head_dim
//         256, where a block of 64 rows has one, too
int cluster_tile_rows(const AttentionShape& shape, int64_t max_kv_len, const Device& device) {
  const int64_t rows = shape.rows(), tiles_of_16 = tiles_of(rows, 16);
  if (shape.fp8 && 2 * shape.pairs() * tiles_of_16 <= device.num_sms &&
      (tiles_of_16 <= 2 || (tiles_of_16 <= kMaxRowTiles && max_kv_len <= kShortTokens)))
    return 16;
  if (rows <= 64) return rows <= 16 || shape.pairs() * tiles_of_16 <= 8 ? 16 : 64;
  if (shape.head_dim == 256) return 64;
  const int64_t tiles = shape.pairs() * tiles_of(rows, 64);
  return tiles <= 16 || (max_kv_len <= kShortTokens && 2 * tiles <= device.num_sms) ? 64 : 128;
}

// Return how many clusters share a row tile if its KV is long:
//
//   tiles of 16 rows   clusters
//   1 to 4             8, 4, 2, 2: all of them find SMs of their own, and so do those of the next call;
//                      4 for 3 or 4 tiles of one or two pairs with long KV, which the tiles of a pair read from the L2
//   5 to 7             1
//   8                  2 for 8 pairs with very long KV: they read it faster than one, but with short KV disturb the
//                      next call
//   more               1
int sharing_clusters(const AttentionShape& shape, int64_t max_kv_len, int tile_rows) {
  const int64_t tiles = shape.pairs() * tiles_of(shape.rows(), tile_rows);
  if (shape.head_dim == 256 || tile_rows != 16 || tiles == 0 || tiles > 8 || max_kv_len < kMinSharedTokens) return 1;
  if (tiles == 8) return shape.pairs() == 8 && max_kv_len >= kVeryLongTokens ? 2 : 1;
  if ((tiles == 3 || tiles == 4) && shape.pairs() <= 2 && max_kv_len >= kLongTokens) return 4;
  return static_cast<int>(8 / tiles);
}

// Return whether clusters are faster than a persistent grid. They copy and multiply less per time than the whole GPU
// could, so the fewer clusters there are, the shorter the KV up to which they win:
//
//   clusters of 64 rows                             max_kv_len
//   up to 16 rows, 8 to 16 clusters                 any: they reach the memory bandwidth
//   up to 16 rows with FP8 pools, from 8 clusters   any
//   fewer than 8                                    8192, or any if clusters share
//   FP8 pools, several row tiles                    10240 for 8 to 32 clusters, 5120 for more
//   several row tiles, from 17 on, pages without    any
//   TMA boxes
//   up to 128 rows                                  16384
//   more                                            10240
//
// With head_dim 256, where a block has an SM to itself, 16-bit pools and up to 4352 KV rows; up to 64 rows and with
// short KV in at most a third as many clusters as there are SMs.
bool use_clusters(const AttentionShape& shape, int64_t max_kv_len, const Device& device, int sharing) {
  if (shape.fixed_split) return false;
  const int64_t rows = shape.rows(), tiles = tiles_of(rows, 64), clusters = shape.pairs() * tiles;
  // Up to 16 rows, and up to 64 rows with head_dim 64, two blocks are faster than one as long as each cluster has an
  // SM. Otherwise each of two blocks, of 64 rows or of 128, needs an SM.
  constexpr int64_t kMaxTwoBlockTokens = 4352;
  if (shape.head_dim == 256) {
    if (shape.fp8 || clusters == 0 || tiles > kMaxRowTiles || 2 * clusters > device.num_sms) return false;
    const bool fits = tiles > 1 || max_kv_len > kShortTokens || 3 * clusters <= device.num_sms;
    return fits && max_kv_len <= kMaxTwoBlockTokens;
  }
  const int64_t wide_tiles = tiles_of(rows, 128);
  const bool two_blocks_per_sm = !shape.fp8 && max_kv_len <= kMaxTwoBlockTokens && (rows <= 16 || shape.head_dim == 64);
  const int64_t sms_needed = rows > 64 ? 2 * shape.pairs() * wide_tiles : two_blocks_per_sm ? clusters : 2 * clusters;
  if (clusters == 0 || tiles > kMaxRowTiles || sms_needed > device.num_sms) return false;
  if (sharing > 1) return true;
  if (rows <= 16 && clusters >= 8 && (clusters <= 16 || shape.fp8)) return true;
  if (clusters < 8) return max_kv_len <= 8192;
  if (shape.fp8 && tiles > 1) return max_kv_len <= (clusters <= 32 ? 10240 : 5120);
  if (tiles > 1 && clusters > 16 && !shape.tma_pages) return true;
  return max_kv_len <= (wide_tiles == 1 ? 16384 : 10240);
}

// Return the blocks of a cluster. Clusters are placed as a whole, so not all SMs can be used; with up to 64 rows the
// blocks of two calls are resident at once.
int cluster_blocks(const AttentionShape& shape, int64_t max_kv_len, const Device& device, int tile_rows, int sharing) {
  const int64_t tiles = std::max<int64_t>(shape.pairs() * tiles_of(shape.rows(), tile_rows), 1);
  const auto blocks = [&](int64_t num_sms) {
    return static_cast<int>(std::clamp<int64_t>(num_sms / tiles, 2, kMaxClusterBlocks));
  };
  if (sharing > 1) return tiles > 4 ? 6 : kMaxClusterBlocks;
  if (shape.fp8 && tile_rows == 16 && tiles > 16) return 4 * tiles <= device.num_sms ? 6 : 2;
  // With short KV, so few that the next call's blocks have SMs of their own.
  if (tile_rows == 16 && tiles <= 16 && max_kv_len <= kShortTokens) return blocks(device.num_sms / 2);
  return blocks(device.num_sms * 3 / 4);
}

// --- persistent grids

// Return the kernel of a persistent grid. FP8 KV is dequantized in registers for up to 32 rows; for up to 64 rows if
// one block per SM has enough to do and KV is not short; in shared memory for more rows. With fixed_split a row's bits
// must not depend on its neighbors, so neither the kernel nor its row tile depends on their number.
Kernel persistent_kernel(const AttentionShape& shape, int64_t max_kv_len, const Device& device) {
  if (!shape.fp8) return Kernel::kWgmma;
  const bool one_block = shape.pairs() < 2 * device.num_sms && max_kv_len > kShortTokens;
  const int max_rows = shape.head_dim < 256 && one_block ? 64 : 32;
  return shape.rows() <= max_rows && !shape.fixed_split ? Kernel::kDequantRegisters : Kernel::kDequantSmem;
}

// Return the row tile of a persistent grid. wgmma multiplies 64 rows at a time, but even for 16 rows that takes less
// time than reading their 16-bit KV. Tiles of 128 rows depend on TMA. If pages have no TMA boxes, some tiles of 64 rows
// copy them row by row, up to kManyRows, where the products start to take longer than the copies. Two tiles of 64 rows,
// or three with short KV, are faster with TMA too, unless KV is long.
int persistent_tile_rows(const AttentionShape& shape, int64_t max_kv_len, Kernel kernel) {
  const int64_t rows = shape.rows();
  constexpr int64_t kManyRows = 512;
  const auto max_rows_of_64 = [&]() -> int64_t {  // the most for tiles of 64
    if (kernel != Kernel::kWgmma || (shape.tma_pages && shape.head_dim == 256)) return 64;
    if (!shape.tma_pages) return kManyRows;
    if (max_kv_len <= kShortTokens) return 192;
    return max_kv_len <= (shape.head_dim == 64 ? kMediumTokens : 8192) ? 128 : 64;
  };
  const bool wide = !shape.fixed_split && rows > max_rows_of_64();
  if (kernel != Kernel::kDequantRegisters) return wide ? 128 : 64;
  const int largest = shape.head_dim == 256 ? 32 : 64;  // whose accumulators fit in registers
  return shape.fixed_split || rows > 32 ? largest : rows > 16 ? 32 : 16;
}

// Return the blocks per SM. Two hide more of each other's latency. With fewer than `min_pairs` pairs, one block keeps
// as much KV in flight and leaves half as many partial results; but not if several row tiles of 64 read the same KV in
// step, and with FP8 dequantized in shared memory only if KV is short.
int occupancy(const AttentionShape& shape, int64_t max_kv_len, const AttentionPlan& plan, int64_t min_pairs) {
  const bool is_long = plan.kernel == Kernel::kDequantSmem && max_kv_len > 8192;
  if (max_blocks_per_sm90(plan.kernel, shape.head_dim, plan.tile_rows, 1) == 1) return 1;
  const bool in_step = plan.kernel == Kernel::kWgmma && plan.row_tiles > 1;
  return shape.pairs() >= min_pairs || is_long || in_step ? 2 : 1;
}

}  // namespace

int max_blocks_per_sm90(Kernel kernel, int64_t head_dim, int tile_rows, int warpgroups) {
  if (head_dim == 256 || warpgroups == 2) return 1;
  return tile_rows <= (kernel == Kernel::kDequantRegisters ? 32 : 64) ? 2 : 1;
}

AttentionPlan plan_sm90(const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                        const PlanOptions& forced) {
  AttentionPlan plan;
  plan.sharing_clusters = 1;
  const int tile_rows = forced.tile_rows.value_or(cluster_tile_rows(shape, max_kv_len, device));
  const int sharing = forced.sharing_clusters.value_or(sharing_clusters(shape, max_kv_len, tile_rows));
  plan.kernel = forced.kernel.value_or(use_clusters(shape, max_kv_len, device, sharing)
                                           ? Kernel::kCluster
                                           : persistent_kernel(shape, max_kv_len, device));
  if (plan.kernel == Kernel::kCluster) {
    plan.tile_rows = tile_rows;
    plan.sharing_clusters = sharing;
    plan.cluster_blocks = forced.cluster_blocks.value_or(cluster_blocks(shape, max_kv_len, device, tile_rows, sharing));
    plan.warpgroups = tile_rows == 128 ? 2 : 1;
    plan.blocks_per_sm = tile_rows == 128 || shape.head_dim == 256 ? 1 : 2;
    set_row_tiles(plan, shape);
    return plan;
  }

  plan.tile_rows = forced.tile_rows.value_or(persistent_tile_rows(shape, max_kv_len, plan.kernel));
  set_row_tiles(plan, shape);
  const int num_sms = device.num_sms;
  set_workers(plan, forced.occupancy.value_or(occupancy(shape, max_kv_len, plan, num_sms + 1)), device);
  plan.whole_items = forced.whole_items.value_or(use_whole_items(plan, shape, max_kv_len));
  // With split FP8 KV, one block has enough in flight for up to twice as many items.
  if (shape.fp8 && !plan.whole_items && !forced.occupancy)
    set_workers(plan, occupancy(shape, max_kv_len, plan, 2 * num_sms), device);
  plan.warpgroups = plan.tile_rows == 128 ? 2 : 1;
  if (plan.kernel == Kernel::kDequantRegisters) {
    const bool two = shape.head_dim < 256 && plan.blocks_per_sm == 1 && max_kv_len > kMaxOneWarpgroupTokens;
    plan.warpgroups = forced.warpgroups.value_or(two || plan.tile_rows == 64 ? 2 : 1);
  }
  return plan;
}

}  // namespace specdec::attention
