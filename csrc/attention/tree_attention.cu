// Which kernel a call of tree_attention gets, from what is static about it: neither lengths nor tables are known here.
#include <algorithm>

#include "attention/launch.h"
#include "attention/merge_parts.cuh"
#include "core/cluster.cuh"
#include "core/errors.h"
#include "core/wgmma.cuh"

namespace specdec {
namespace {

constexpr int kMaxLanes = 4;  // beyond, row tiles follow each other on the work line

// What a table has room for: so little KV of a request that cutting it in two and merging takes longer than reading it,
// or so little that a request of that length among short ones is not worth it.
constexpr int kShortRows = 1088, kMediumRows = 2304;

// And so little that two warpgroups of a block find no more to do than one.
constexpr int kFewRows = 768;

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  SD_CUDA_CHECK("tree_attention", cudaGetDevice(&device));
  SD_CUDA_CHECK("tree_attention", cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Of the pages of one pool, from the first row to the last.
int64_t span_bytes(const PoolStrides& s, const TreeAttentionParams& p) {
  return (p.fp8 ? 1 : 2) * (p.rows.num_pages * s.page + p.rows.page_size * s.row + p.kv_heads * s.head);
}

// Tensor cores take 16-bit floats whose rows start on 16 bytes, of which 2^32 are counted, and need room for two stages
// of K and V.
bool has_tensor_cores_for(const TreeAttentionParams& p) {
  constexpr int64_t kMaxSpan = int64_t{16} << 32;
  return p.dtype != kFloat32 && p.aligned && span_bytes(p.k_strides, p) <= kMaxSpan &&
         span_bytes(p.v_strides, p) <= kMaxSpan &&
         (p.head_dim < 256 || device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) > 128 * 1024);
}

// Query rows of one request: exact for padded ones, the mean for packed ones.
int64_t likely_rows(const TreeAttentionParams& p) {
  const int64_t rows = p.cu_seqlens_q ? (p.q_rows + p.batch) / (p.batch + 1) : p.q_rows;
  return rows * (p.q_heads / p.kv_heads);
}

enum class Kernel { kMma, kWgmma, kWgmmaFp8, kWgmmaWidened, kCluster };

// wgmma multiplies 64 rows at a time, but even for 16 of them that takes less time than their KV of 16 bits. Where a
// row's bits must not depend on its neighbours, the kernel and its tile do not depend on their number. Pools of 8 bits
// become 16 in registers for 64 rows too where one block a multiprocessor has enough to do, but not for short KV.
Kernel kernel_for(const TreeAttentionParams& p, int64_t rows) {
  const Device device = current_device("tree_attention");
  if (!device.has_wgmma) return Kernel::kMma;
  if (!p.fp8) return Kernel::kWgmma;
  const bool one_block = p.batch * p.kv_heads < 2 * device.multiprocessors && row_capacity(p.rows) > kShortRows;
  const int most = p.head_dim < 256 && one_block ? 64 : 32;
  return rows <= most && !p.fixed_split ? Kernel::kWgmmaFp8 : Kernel::kWgmmaWidened;
}

// Row tiles of 64 of a request and KV head.
int64_t tiles_of_64(int64_t rows) { return (rows + 63) / 64; }

// Of a cluster's tile. Of 128 rows a block takes a multiprocessor for itself, which is better where there would be more
// clusters of 64 rows, of few blocks each, unless the table has room for short KV only. Of 8-bit pools some tiles of 16
// rows are better than one of 64, unless they are four that read long KV.
int cluster_rows(const TreeAttentionParams& p, int64_t rows) {
  const int64_t tiles_of_16 = (rows + 15) / 16;
  if (p.fp8 && 2 * p.batch * p.kv_heads * tiles_of_16 <= current_device("tree_attention").multiprocessors &&
      (tiles_of_16 <= 2 || (tiles_of_16 <= kMaxLanes && row_capacity(p.rows) <= kShortRows)))
    return 16;
  if (rows <= 64) return rows <= 16 ? 16 : 64;
  return p.batch * p.kv_heads * tiles_of_64(rows) <= 16 || row_capacity(p.rows) <= kShortRows ? 64 : 128;
}

// Of a tile, for so many of a request and KV head.
int tile_rows(const TreeAttentionParams& p, Kernel kernel, int64_t rows) {
  if (kernel == Kernel::kCluster) return cluster_rows(p, rows);
  if (kernel == Kernel::kWgmma || kernel == Kernel::kWgmmaWidened) return rows > 64 && !p.fixed_split ? 128 : 64;
  const int most = p.head_dim == 256 ? 32 : 64;  // whose sums fit in registers
  return p.fixed_split || rows > 32 ? most : rows > 16 ? 32 : 16;
}

// KV rows of a tile.
int tokens_of(const TreeAttentionParams& p, Kernel kernel, int rows) {
  if (kernel == Kernel::kMma) return mma_tokens(p.fp8);
  if (kernel == Kernel::kCluster) return 64;
  if (kernel == Kernel::kWgmmaFp8) return kWgmmaFp8Tokens;
  return wgmma_tokens(p.head_dim, rows);
}

// Blocks on a multiprocessor: all of a call have to run at once. Two hide more of each other's waiting; where there are
// fewer than `least` groups, one has as much on its way and leaves half the parts, but of 8-bit pools that is for short
// KV only.
int blocks_at_once(const TreeAttentionParams& p, const Cut& cut, Kernel kernel, int multiprocessors, int least) {
  if (p.head_dim == 256) return 1;
  if (kernel != Kernel::kMma) {
    if (kernel == Kernel::kWgmmaFp8 && cut.rows == 64) return 1;
    const bool is_long = kernel == Kernel::kWgmmaWidened && row_capacity(p.rows) > 8192;
    return cut.rows <= 64 && (p.batch * p.kv_heads >= least || is_long) ? 2 : 1;
  }
  return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) >= 212 * 1024 ? 2 : 1;
}

// Whether workers take whole groups, without a look at lengths: where KV is short and a quarter of them, or all but a
// few, are busy to the end. All share the memory's bandwidth, of which one alone can use several times its part, so
// that it matters little who has more to do.
bool takes_whole_groups(const TreeAttentionParams& p, const Cut& cut, int64_t rows) {
  if (p.fixed_split || p.cu_seqlens_q || rows > cut.rows * cut.lanes || row_capacity(p.rows) > kMediumRows)
    return false;
  const int64_t groups = p.batch * p.kv_heads, each = (groups + cut.max_workers - 1) / cut.max_workers;
  return groups * 16 >= each * cut.max_workers * (row_capacity(p.rows) <= kShortRows ? 4 : 11);
}

struct Choice {
  Cut cut;
  Kernel kernel;
};

// Clusters that share a tile of 16 rows where its KV is long, for which the table needs room: so many that all have
// multiprocessors of their own, and the next call's too. Two of six blocks for each of eight tiles read long KV faster
// than one of eight, but those that find it short disturb the next call's: that is for tables which hold very much.
constexpr int64_t kVeryLongRows = 65536;
int sharing_clusters(const TreeAttentionParams& p, int64_t rows) {
  const int tile = cluster_rows(p, rows);
  const int64_t tiles = p.batch * p.kv_heads * ((rows - 1) / tile + 1);
  if (tile != 16 || tiles > 8 || row_capacity(p.rows) < kWorthSharing) return 1;
  if (tiles == 8) return row_capacity(p.rows) >= kVeryLongRows ? 2 : 1;
  return static_cast<int>(std::min<int64_t>(8 / tiles, kMaxCluster));
}

// Blocks of a cluster for each KV head of a request and tile of its rows, where these are few; else 0. What clusters
// copy and multiply in a given time is less than the whole device could, so that long KV, as far as the table has room
// for it, is left to the work line.
int cluster_blocks(const TreeAttentionParams& p, int64_t rows) {
  const Device device = current_device("tree_attention");
  const int64_t tiles = tiles_of_64(rows), clusters = p.batch * p.kv_heads * tiles;
  if (!device.has_wgmma || p.fixed_split || p.head_dim == 256) return 0;
  // Up to 16 rows are faster with two blocks than with one as long as there is a multiprocessor for each.
  constexpr int64_t kMostRows = 4352;
  const int64_t needed = rows <= 16 && !p.fp8 && row_capacity(p.rows) <= kMostRows ? clusters : 2 * clusters;
  if (clusters == 0 || tiles > kMaxLanes || needed > device.multiprocessors) return 0;
  const int tile = cluster_rows(p, rows);
  const int sharing = sharing_clusters(p, rows);
  const bool reach_the_memory =
      sharing > 1 || (tile == 16 && clusters >= 8 && (clusters <= 16 || (p.fp8 && rows <= 16)));
  const int64_t most = reach_the_memory ? INT32_MAX
                       : clusters < 8   ? 8192
                       : tiles == 1     ? 16384
                       : clusters <= 32 ? 10240
                                        : 5120;
  if (row_capacity(p.rows) > most) return 0;
  // Clusters are whole, for which not all of the device has room. Of up to 64 rows two calls' blocks are there at once.
  const int64_t here = p.batch * p.kv_heads * ((rows - 1) / tile + 1);
  if (sharing > 1) return sharing * here > 8 ? 6 : kMaxCluster;
  if (p.fp8 && tile == 16 && here > 16) return 4 * here <= device.multiprocessors ? 6 : 2;
  // Short KV: so few that the next call's blocks have multiprocessors of their own.
  if (tile == 16 && here <= 16 && row_capacity(p.rows) <= kShortRows)
    return static_cast<int>(std::clamp<int64_t>(device.multiprocessors / 2 / here, 2, kMaxCluster));
  return static_cast<int>(std::clamp<int64_t>(device.multiprocessors * 3 / 4 / here, 2, kMaxCluster));
}

Choice choose(const TreeAttentionParams& p) {
  const int64_t rows = likely_rows(p);
  Choice c{};
  Cut& cut = c.cut;
  cut.cluster = cluster_blocks(p, rows);
  cut.parts = cut.cluster ? sharing_clusters(p, rows) : 1;
  c.kernel = cut.cluster ? Kernel::kCluster : kernel_for(p, rows);
  cut.rows = tile_rows(p, c.kernel, rows);
  cut.lanes = static_cast<int>(std::min<int64_t>((rows + cut.rows - 1) / cut.rows, kMaxLanes));
  cut.tile = cutlass::FastDivmod(tokens_of(p, c.kernel, cut.rows));
  cut.split = cutlass::FastDivmod(p.fixed_split ? cut.tile.div(static_cast<int>(p.fixed_split)) : 1);
  cut.group = cutlass::FastDivmod(static_cast<int>(p.q_heads / p.kv_heads));
  cut.page_size = cutlass::FastDivmod(static_cast<int>(p.rows.page_size));
  const int multiprocessors = current_device("tree_attention").multiprocessors;
  const auto run = [&](int blocks) {
    cut.blocks = blocks;
    cut.max_workers = std::clamp(multiprocessors * blocks / cut.lanes, 1, kMaxWorkers);
  };
  run(blocks_at_once(p, cut, c.kernel, multiprocessors, multiprocessors + 1));
  cut.whole = !cut.cluster && takes_whole_groups(p, cut, rows);
  // 8-bit pools that are cut have enough on their way in one block up to twice as many groups.
  if (!cut.whole && p.fp8) run(blocks_at_once(p, cut, c.kernel, multiprocessors, 2 * multiprocessors));
  cut.two_groups =
      c.kernel == Kernel::kWgmmaFp8 && p.head_dim < 256 && cut.blocks == 1 && row_capacity(p.rows) > kFewRows;
  return c;
}

// Partial results that a call may leave.
int64_t max_parts(const TreeAttentionParams& p, const Cut& cut) {
  if (p.fixed_split == 0) return int64_t{2} * cut.max_workers * cut.lanes;
  const int64_t rows = p.q_rows * (p.q_heads / p.kv_heads), block = int64_t{cut.rows} * cut.lanes;
  const int64_t blocks = p.cu_seqlens_q ? rows / block + p.batch : (rows + block - 1) / block * p.batch;
  const int64_t splits = (row_capacity(p.rows) + p.fixed_split - 1) / p.fixed_split;
  return blocks * p.kv_heads * splits * cut.lanes;
}

}  // namespace

int64_t tree_attention_workspace_cuda(const TreeAttentionParams& p) {
  if (!has_tensor_cores_for(p)) return 0;
  const Cut cut = choose(p).cut;
  if (cut.cluster && cut.parts > 1) return p.batch * p.kv_heads * cut.parts * cut.lanes * part_floats(cut, p.head_dim);
  if (cut.cluster || cut.whole) return 0;
  return max_parts(p, cut) * part_floats(cut, p.head_dim);
}

void tree_attention_cuda(const TreeAttentionParams& p, Stream stream) {
  if (!has_tensor_cores_for(p)) return plain_attention(p, stream);
  const auto [cut, kernel] = choose(p);
  if (kernel == Kernel::kCluster) {
    if (p.head_dim == 64) return few::cluster_attention_of<64>(p, cut, stream);
    return few::cluster_attention_of<128>(p, cut, stream);
  }
  with_head_dim(p.head_dim, [&]<int D>() {
    if (kernel == Kernel::kMma) return mma_attention_of<D>(p, cut, stream);
    if (kernel == Kernel::kWgmma) return wgmma_attention_of<D>(p, cut, stream);
    if (kernel == Kernel::kWgmmaFp8) return wgmma_fp8_attention_of<D>(p, cut, stream);
    wgmma_widened_attention_of<D>(p, cut, stream);
  });
}

}  // namespace specdec
