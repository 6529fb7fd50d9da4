// AttentionPlan: which kernel runs a tree_attention call, and how the work is divided.
//
// plan_attention() computes it on the host as a pure function of a call's static shape (AttentionShape), a bound on the
// KV length, and the GPU. It never depends on actual lengths or page tables, which only the device knows, so one
// captured CUDA graph serves all of them. This code is free of CUDA: the rules compile and are tested without a GPU.
//
// Where to look:
//   plan.cpp       plan_attention(): picks the rules by GPU, parses and checks plan names that a caller forces
//   plan_sm90.cpp  rules for Hopper
//   plan_sm80.cpp  rules for every other GPU with tensor cores
//
// To see which kernel a shape gets, call the rules from Python; no GPU is needed:
//
//   sd.attention_plan(batch=4, q_rows=32, q_heads=32, kv_heads=8, head_dim=128, max_kv_len=8192, gpu=sd.H200).name
//   -> "sm90.cluster.128.blocks3.sharing1"
//
// (sd is specdec_kernels; see plans.py.) The tests' attention_plans.txt lists the plans of some 200 shapes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/device.h"

namespace specdec::attention {

enum class Kernel {
  kPlain,             // no tensor cores: any dtype, any alignment (plain/plain.cu)
  kMma,               // mma.sync, compute capability 8.0 and later except Hopper (sm80/mma.cuh)
  kWgmma,             // wgmma on Hopper, 16-bit pools (sm90/wgmma.cuh)
  kDequantRegisters,  // wgmma on Hopper, FP8 pools dequantized in registers (sm90/dequant_registers.cuh)
  kDequantSmem,       // wgmma on Hopper, FP8 pools dequantized in shared memory (sm90/wgmma.cuh, dequant_ring.cuh)
  kCluster,           // Hopper: one thread-block cluster per request, KV head and row tile (sm90/cluster.cuh)
};

constexpr int kTmaBoxTokens = 16;  // KV rows of one page in a TMA box, 128 bytes of each
constexpr bool has_tma_boxes(int64_t page_size) { return page_size % kTmaBoxTokens == 0; }

// The static properties of a call.
struct AttentionShape {
  int64_t batch, q_rows, q_heads, kv_heads, head_dim;
  bool packed;          // q_rows counts the rows of all requests (cu_seqlens_q is given)
  bool fp8;             // pools hold float8_e4m3fn
  bool tensor_cores;    // usable: 16-bit queries, rows aligned to 16 bytes, pools that the kernels can address
  bool tma_pages;       // TMA can copy the pages: page_size is a multiple of kTmaBoxTokens
  int64_t fixed_split;  // batch invariance: KV is split at multiples of this many rows; 0: evenly over the workers

  // Return the rows of one request and KV head: query rows times the heads of a GQA group. Exact if requests are padded
  // to q_rows, the mean if they are packed.
  int64_t rows() const {
    const int64_t rows_per_request = packed && batch > 0 ? (q_rows + batch - 1) / batch : q_rows;
    return rows_per_request * (q_heads / kv_heads);
  }
  // Return the number of (request, KV head) pairs.
  int64_t pairs() const { return batch * kv_heads; }
};

struct AttentionPlan {
  Kernel kernel = Kernel::kPlain;
  int tile_rows = 0;         // rows (query rows times heads) of a row tile: what one block computes at a time
  int tile_tokens = 0;       // KV rows of a KV tile
  int row_tiles = 0;         // row tiles that read the same KV in step, each in a block of its own
  int blocks_per_sm = 0;     // of a persistent grid
  int cluster_blocks = 0;    // blocks of a cluster, which split one row tile's KV; 0: no clusters
  int sharing_clusters = 0;  // clusters that split the KV of a row tile if it is long; 1: no such split
  bool whole_items = false;  // one worker per work item (request, KV head, row tiles): KV is not split
  int warpgroups = 0;        // that run MMAs in a block
  int workers = 0;           // of a persistent grid, each of row_tiles blocks

  bool operator==(const AttentionPlan&) const = default;
};

constexpr int kMaxRowTiles = 4;   // that read KV in step; further row tiles become work items of their own
constexpr int kMaxWorkers = 512;  // two per SM; no GPU has 256 SMs
constexpr int kMaxClusterBlocks = 8;
// From this many KV rows on, the clusters of a plan with sharing_clusters > 1 split a row tile. With fewer, the first
// cluster does it alone, because merging would cost more than it saves.
constexpr int kMinSharedTokens = 2304;

// Return the plan of a call whose requests have at most max_kv_len KV rows each.
//
// `name` forces a plan, spelled as by to_string(): "<architecture>.<kernel>.<tile rows>", then options; whatever a name
// leaves out follows the rules. Throws ValueError through `check` for an unknown name, and for a plan that cannot run
// this shape on this device.
AttentionPlan plan_attention(const Check& check, const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                             const std::optional<std::string>& name);

// Return the plan's name, e.g. "sm90.cluster.16.blocks8.sharing1", "sm90.wgmma.128.split.occupancy1", "plain".
std::string to_string(const AttentionPlan& plan);

// Return the bytes of workspace that a call needs for partial results of split KV.
int64_t workspace_bytes(const AttentionPlan& plan, const AttentionShape& shape, int64_t max_kv_len);

// Return the KV rows of a KV tile.
constexpr int tile_tokens_of(Kernel kernel, int64_t head_dim, int tile_rows, bool fp8) {
  switch (kernel) {
    case Kernel::kMma:  // tiles of equal bytes
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

// Return the floats of one partial result: per row of a row tile its unnormalized output, maximum and sum of weights;
// and the counters of workers that have stored theirs, one per item, or one per row if clusters share the item.
constexpr int kCounterFloats = 4;
constexpr int64_t partial_floats(int tile_rows, bool cluster, int64_t head_dim) {
  return int64_t{tile_rows} * (head_dim + 2) + (cluster ? 2 * tile_rows : kCounterFloats);
}

// A compiled kernel. Tests require that every variant is chosen for some shape.
struct KernelVariant {
  Kernel kernel;
  int tile_rows, head_dim;
  bool fp8;
  int occupancy;   // of kernels that are compiled for one or for two blocks per SM; else 0
  int warpgroups;  // of kernels that are compiled for one or for two; else 0
  bool sharing;    // whether clusters share a row tile

  bool runs(const AttentionPlan& plan, const AttentionShape& shape) const;
};
const std::vector<KernelVariant>& kernel_variants();
// Return the variant's name, e.g. "sm90.wgmma.64.occupancy2.d128", with ".fp8" appended for FP8 pools.
std::string to_string(const KernelVariant& variant);

}  // namespace specdec::attention
