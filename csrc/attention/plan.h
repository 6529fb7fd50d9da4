// Which kernel runs a call of tree_attention, and how it divides the work: a value, made on the host from what is
// static about the call. Lengths and page tables are known to the device alone, so a plan depends on none of them, and
// a captured call serves all. Nothing here knows CUDA: the rules compile, and are tested, where there is no GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/device.h"

namespace specdec::attention {

enum class Kernel {
  kPlain,             // no tensor cores: any dtype, any alignment
  kMma,               // mma.sync, compute capability 8.0 and later; Hopper has kernels of its own
  kWgmma,             // wgmma on Hopper, pools of 16 bits
  kDequantRegisters,  // wgmma on Hopper, pools of 8 bits that become 16 bits in registers
  kDequantSmem,       // wgmma on Hopper, pools of 8 bits that become 16 bits in shared memory
  kCluster,           // Hopper: a thread-block cluster for each request, KV head and row tile
};

constexpr int kBoxTokens = 16;  // KV rows of a page that Hopper's copy engine copies at once, 128 bytes of each
constexpr bool is_of_boxes(int64_t page_size) { return page_size % kBoxTokens == 0; }

// What is static about a call.
struct AttentionShape {
  int64_t batch, q_rows, q_heads, kv_heads, head_dim;
  bool packed;          // q_rows are those of all requests together
  bool fp8;             // pools hold float8_e4m3fn
  bool tensor_cores;    // may be used: 16-bit queries, rows that start on 16 bytes, pools that kernels can address
  bool boxes;           // pages are whole boxes of the copy engine
  int64_t fixed_split;  // KV is split at multiples of so many rows, whatever else is in the batch; 0: evenly

  // Query rows times heads of one request and KV head, the rows of its row tiles: exact where requests are padded, the
  // mean where they are packed.
  int64_t rows() const {
    const int64_t of_request = packed && batch > 0 ? (q_rows + batch - 1) / batch : q_rows;
    return of_request * (q_heads / kv_heads);
  }
  // Pairs of a request and a KV head.
  int64_t pairs() const { return batch * kv_heads; }
};

struct AttentionPlan {
  Kernel kernel = Kernel::kPlain;
  int tile_rows = 0;         // query rows (times heads) of a row tile, which one block computes at a time
  int tile_tokens = 0;       // KV rows of a KV tile
  int row_tiles = 0;         // row tiles that walk the same KV in step, each in a block of its own
  int blocks_per_sm = 0;     // of a persistent grid
  int cluster_blocks = 0;    // blocks of a cluster that share one row tile's KV; 0: no clusters
  int sharing_clusters = 0;  // clusters that share a row tile whose KV is long; 1: none do
  bool whole_items = false;  // each (request, KV head, row tiles) is one worker's: KV is not split
  int warpgroups = 0;        // that multiply in a block
  int workers = 0;           // of a persistent grid, each of row_tiles blocks

  bool operator==(const AttentionPlan&) const = default;
};

constexpr int kMaxRowTiles = 4;   // that walk KV in step; further row tiles follow as items of their own
constexpr int kMaxWorkers = 512;  // two for each multiprocessor, of which no device has so many
constexpr int kMaxClusterBlocks = 8;
// Of longer KV the clusters of a plan with sharing_clusters > 1 share a row tile; of shorter KV the first one has it
// all, since the merge would take longer than what the others read.
constexpr int kMinSharedTokens = 2304;

// The plan of a call whose requests have at most max_kv_len KV rows each. `name` forces one, as to_string() spells it:
// "<machine>.<kernel>.<tile rows>", then options; what a name leaves out follows the rules. Throws ValueError by
// `check` for a name that is none, and for a plan that cannot run such a shape on such a device.
AttentionPlan plan_attention(const Check& check, const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                             const std::optional<std::string>& name);

// As "sm90.cluster.16.blocks8.sharing1", "sm90.wgmma.128.split.occupancy1", "plain".
std::string to_string(const AttentionPlan& plan);

// Bytes of workspace that a call needs for the partial results of KV that is split.
int64_t workspace_bytes(const AttentionPlan& plan, const AttentionShape& shape, int64_t max_kv_len);

// KV rows of a KV tile.
constexpr int tile_tokens_of(Kernel kernel, int64_t head_dim, int tile_rows, bool fp8) {
  switch (kernel) {
    case Kernel::kMma:  // tiles of the same bytes
      return fp8 ? 128 : 64;
    case Kernel::kWgmma:
    case Kernel::kDequantSmem:
      return head_dim == 64 || (head_dim == 128 && tile_rows == 128) ? 128 : 64;
    case Kernel::kCluster:
      return fp8 && tile_rows == 16 ? 128 : 64;
    case Kernel::kPlain:
    case Kernel::kDequantRegisters:
      return 64;
  }
  return 64;
}

// Floats of one partial result: for each row of a row tile its sums, the maximum and the sum of its weights, and the
// counter of those that have left theirs, one for an item, or one for each row where clusters share it.
constexpr int kCounterFloats = 4;
constexpr int64_t partial_floats(int tile_rows, bool cluster, int64_t head_dim) {
  return int64_t{tile_rows} * (head_dim + 2) + (cluster ? 2 * tile_rows : kCounterFloats);
}

// One compiled kernel. Every one of them must be the choice of some shape, which tests hold the rules to.
struct KernelVariant {
  Kernel kernel;
  int tile_rows, head_dim;
  bool fp8;
  int occupancy;   // of kernels that are compiled for one or two blocks on a multiprocessor; else 0
  int warpgroups;  // of kernels that are compiled for one or two; else 0
  bool sharing;    // whether clusters share a row tile

  bool runs(const AttentionPlan& plan, const AttentionShape& shape) const;
};
const std::vector<KernelVariant>& kernel_variants();
// As "sm90.wgmma.64.occupancy2.d128", with ".fp8" behind it for pools of 8 bits.
std::string to_string(const KernelVariant& variant);

}  // namespace specdec::attention
