// MlaPlan: which kernel runs an mla_tree_attention call, and how the work is divided.
//
// plan_mla() computes it on the host as a pure function of a call's static shape (MlaShape), a bound on the KV length,
// and the GPU; never from actual lengths, which only the device knows. plan_sm90.cpp has the rules for Hopper,
// plan_sm80.cpp those for every GPU with tensor cores, plan.cpp reads and checks plan names that a caller forces. From
// Python, `specdec_kernels.mla_plan` calls the rules without a GPU; the tests' mla_plans.txt lists the plans of many
// shapes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/device.h"

namespace specdec::mla {

enum class RowFormat { kAsQueries, kFloat8, k656Bytes };  // of latent rows; see latent_row.h

enum class Kernel {
  kPlain,  // no tensor cores: any dtype, any alignment (plain/plain.cu)
  kMma,    // mma.sync, compute capability 8.0 and later (sm80/mma.cuh)
  kWgmma,  // wgmma, compute capability 9.0, rows of 512 + 64 elements (sm90/wgmma.cuh)
};

// The static properties of a call.
struct MlaShape {
  int64_t batch, q_rows, q_heads, latent_dim, width;
  bool packed;          // q_rows counts the rows of all requests
  bool listed;          // each query row has an index list
  RowFormat format;     // of the latent rows
  bool tensor_cores;    // usable: 16-bit queries, rows aligned to 16 bytes
  int64_t fixed_split;  // batch invariance: KV is split at multiples of this many rows; 0: evenly

  // Return the work items, each with KV of its own, and the rows (query rows times heads) of one: a request, or with
  // index lists a query row. If requests are packed, the mean rows.
  int64_t items() const { return listed ? (packed ? 1 : batch) * q_rows : batch; }
  int64_t rows() const {
    if (listed) return q_heads;
    return (packed && batch > 0 ? (q_rows + batch - 1) / batch : q_rows) * q_heads;
  }
  // Return a bound on the row tiles of all items, and on the blocks of a grid with one per row tile; the padding rows
  // after the last packed request are one more item.
  int64_t row_tiles(int tile_rows) const {
    if (!packed || listed) return items() * ((rows() + tile_rows - 1) / tile_rows);
    return q_rows * q_heads / tile_rows + batch + 1;
  }
};

struct MlaPlan {
  Kernel kernel = Kernel::kPlain;
  int tile_rows = 0;    // rows (query rows times heads) of a row tile: what one block computes at a time
  int tile_tokens = 0;  // KV rows of a KV tile
  int splits = 1;       // blocks that share the KV of a row tile if it is long; kWgmma: 1, or splits of fixed_split
  // For kWgmma, a persistent grid:
  int row_tiles = 1;         // row tiles that read the same KV in step, each in a block of its own
  int workers = 0;           // each of row_tiles blocks
  bool whole_items = false;  // one worker per work item: KV is not split

  bool operator==(const MlaPlan&) const = default;
};

// KV rows that a split has at least: shorter ones cost more to merge than they save.
constexpr int64_t kMinSplitTokens = 256;

// Return the plan of a call whose requests have at most max_kv_len KV rows each.
//
// `name` forces a plan, spelled as by to_string(); whatever a name leaves out follows the rules. Throws ValueError
// through `check` for an unknown name, and for a plan that cannot run this shape on this device.
MlaPlan plan_mla(const Check& check, const MlaShape& shape, int64_t max_kv_len, const Device& device,
                 const std::optional<std::string>& name);

// Return the plan's name, e.g. "sm90.wgmma.64.split", "sm80.mma.64.splits8", "plain".
std::string to_string(const MlaPlan& plan);

// Return the floats of one partial result: per row its unnormalized output, maximum and sum of weights.
constexpr int64_t partial_floats(int tile_rows, int64_t latent_dim) { return int64_t{tile_rows} * (latent_dim + 2); }

// Return the bytes of workspace that a call needs for partial results of split KV, and one counter per row tile.
int64_t workspace_bytes(const MlaPlan& plan, const MlaShape& shape);

// A compiled kernel. Tests require that every variant is chosen for some shape.
struct KernelVariant {
  Kernel kernel;
  int tile_rows, tile_tokens;
  RowFormat format;

  bool runs(const MlaPlan& plan, const MlaShape& shape) const {
    return plan.kernel == kernel && plan.tile_rows == tile_rows && plan.tile_tokens == tile_tokens &&
           shape.format == format;
  }
};
const std::vector<KernelVariant>& kernel_variants();
// Return the variant's name, e.g. "sm80.mma.64", with ".fp8" or ".656" appended for such rows.
std::string to_string(const KernelVariant& variant);

}  // namespace specdec::mla
