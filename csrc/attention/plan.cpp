// Choose, name and check the plans of tree_attention (plan.h). The rules are in plan_sm90.cpp and plan_sm80.cpp.
#include "attention/plan.h"

#include <algorithm>
#include <string_view>

#include "attention/plan_name.h"
#include "attention/plan_rules.h"
#include "core/dispatch.h"

namespace specdec::attention {
namespace {

struct KernelName {
  Kernel kernel;
  std::string_view name;
};
constexpr KernelName kKernelNames[] = {
    {Kernel::kPlain, "plain"},
    {Kernel::kMma, "sm80.mma"},
    {Kernel::kWgmma, "sm90.wgmma"},
    {Kernel::kDequantRegisters, "sm90.dequant_registers"},
    {Kernel::kDequantSmem, "sm90.dequant_smem"},
    {Kernel::kCluster, "sm90.cluster"},
};

std::string kernel_name(Kernel kernel, int tile_rows) {
  for (const KernelName& each : kKernelNames)
    if (each.kernel == kernel)
      return std::string(each.name) + (kernel == Kernel::kPlain ? "" : "." + std::to_string(tile_rows));
  return {};
}

// Return the option names of a kernel; blocks, sharing, occupancy and warpgroups are followed by a number.
std::vector<std::string_view> option_names(Kernel kernel) {
  if (kernel == Kernel::kPlain) return {};
  if (kernel == Kernel::kCluster) return {"blocks", "sharing"};
  if (kernel == Kernel::kDequantRegisters) return {"split", "whole", "occupancy", "warpgroups"};
  return {"split", "whole", "occupancy"};
}

// Parse one option into `options`; return false if the kernel has no such option.
bool parse_option(std::string_view text, Kernel kernel, PlanOptions& options) {
  for (const std::string_view name : option_names(kernel)) {
    if (text.substr(0, name.size()) != name) continue;
    const std::string_view digits = text.substr(name.size());
    if (name == "split" || name == "whole") {
      options.whole_items = name == "whole";
      return digits.empty();
    }
    const std::optional<int> number = parse_number(digits);
    if (!number) return false;
    (name == "blocks"      ? options.cluster_blocks
     : name == "sharing"   ? options.sharing_clusters
     : name == "occupancy" ? options.occupancy
                           : options.warpgroups) = *number;
    return true;
  }
  return false;
}

PlanOptions parse_plan_name(const Check& check, const std::string& name) {
  PlanOptions options;
  std::string_view rest = parse_kernel(check, name, kernel_variants(), kernel_name, options);
  while (!rest.empty()) {
    const size_t end = std::min(rest.find('.', 1), rest.size());
    const std::string_view option = rest.substr(1, end - 1);
    if (!parse_option(option, *options.kernel, options)) {
      std::string expected;
      for (const std::string_view each : option_names(*options.kernel))
        expected +=
            (expected.empty() ? "" : ", ") + std::string(each) + (each == "split" || each == "whole" ? "" : "<number>");
      check.that(false, "plan", "is " + name, "options of " + expected);
    }
    rest = rest.substr(end);
  }
  return options;
}

// Return whether the tensor cores can be used: with head_dim 256 they need room for two stages of K and V.
bool can_use_tensor_cores(const AttentionShape& shape, const Device& device) {
  return shape.tensor_cores && (shape.head_dim < 256 || device.shared_bytes_per_block > 128 * 1024);
}

// Throw unless a forced plan can run.
void check_plan(const Check& check, const std::string& name, const AttentionPlan& plan, const AttentionShape& shape,
                const Device& device) {
  const auto that = [&](bool ok, const std::string& expected) { check.that(ok, "plan", "is " + name, expected); };
  const bool is_mma = plan.kernel == Kernel::kMma;
  that(can_use_tensor_cores(shape, device), "plain where tensor cores cannot be used");
  that(is_mma != device.has_wgmma,
       std::string("plain or a plan of ") + (device.has_wgmma ? "sm90" : "sm80") + " on this device");
  if (plan.kernel == Kernel::kCluster) {
    that(!shape.fixed_split, "one without clusters with fixed_split");
    that(plan.cluster_blocks >= 2 && plan.cluster_blocks <= kMaxClusterBlocks, "2 to 8 blocks of a cluster");
    that(plan.sharing_clusters >= 1 && plan.sharing_clusters <= kMaxClusterBlocks, "1 to 8 clusters that share");
    that(shape.batch * plan.row_tiles <= kMaxGridY, "one without clusters for a batch of this size");
  } else {
    const int max_blocks = is_mma ? max_blocks_per_sm80(shape.head_dim, device)
                                  : max_blocks_per_sm90(plan.kernel, shape.head_dim, plan.tile_rows, plan.warpgroups);
    that(plan.blocks_per_sm >= 1 && plan.blocks_per_sm <= max_blocks,
         max_blocks == 1 ? "occupancy1" : "occupancy1 or occupancy2");
    that(!plan.whole_items ||
             (!shape.packed && !shape.fixed_split && shape.rows() <= int64_t{plan.tile_rows} * plan.row_tiles),
         "split for packed rows, more rows than the row tiles have, or fixed_split");
  }
  const auto& variants = kernel_variants();
  that(std::any_of(variants.begin(), variants.end(), [&](const auto& each) { return each.runs(plan, shape); }),
       "one for head_dim " + std::to_string(shape.head_dim) + " and " + (shape.fp8 ? "8" : "16") + "-bit pools");
}

}  // namespace

void set_row_tiles(AttentionPlan& plan, const AttentionShape& shape) {
  plan.row_tiles =
      static_cast<int>(std::min<int64_t>((shape.rows() + plan.tile_rows - 1) / plan.tile_rows, kMaxRowTiles));
  plan.tile_tokens = tile_tokens_of(plan.kernel, shape.head_dim, plan.tile_rows, shape.fp8);
}

void set_workers(AttentionPlan& plan, int blocks_per_sm, const Device& device) {
  plan.blocks_per_sm = blocks_per_sm;
  plan.workers = std::clamp(device.num_sms * blocks_per_sm / plan.row_tiles, 1, kMaxWorkers);
}

bool use_whole_items(const AttentionPlan& plan, const AttentionShape& shape, int64_t max_kv_len) {
  if (shape.fixed_split || shape.packed || shape.rows() > plan.tile_rows * plan.row_tiles || max_kv_len > kMediumTokens)
    return false;
  const int64_t items = shape.pairs(), each = (items + plan.workers - 1) / plan.workers;
  return items * 16 >= each * plan.workers * (max_kv_len <= kShortTokens ? 4 : 11);
}

AttentionPlan plan_attention(const Check& check, const AttentionShape& shape, int64_t max_kv_len, const Device& device,
                             const std::optional<std::string>& name) {
  const PlanOptions forced = name ? parse_plan_name(check, *name) : PlanOptions{};
  if (forced.kernel == Kernel::kPlain || (!name && !can_use_tensor_cores(shape, device))) return {};
  const bool sm90 = forced.kernel ? forced.kernel != Kernel::kMma : device.has_wgmma;
  const auto rules = sm90 ? plan_sm90 : plan_sm80;
  const AttentionPlan plan = rules(shape, max_kv_len, device, forced);
  if (name) check_plan(check, *name, plan, shape, device);
  return plan;
}

std::string to_string(const AttentionPlan& plan) {
  std::string name = kernel_name(plan.kernel, plan.tile_rows);
  if (plan.kernel == Kernel::kPlain) return name;
  if (plan.kernel == Kernel::kCluster)
    return name + ".blocks" + std::to_string(plan.cluster_blocks) + ".sharing" + std::to_string(plan.sharing_clusters);
  name += plan.whole_items ? ".whole" : ".split";
  name += ".occupancy" + std::to_string(plan.blocks_per_sm);
  if (plan.kernel == Kernel::kDequantRegisters) name += ".warpgroups" + std::to_string(plan.warpgroups);
  return name;
}

int64_t workspace_bytes(const AttentionPlan& plan, const AttentionShape& shape, int64_t max_kv_len) {
  if (plan.kernel == Kernel::kPlain || plan.whole_items) return 0;
  const bool is_cluster = plan.kernel == Kernel::kCluster;
  const int64_t bytes_each = 4 * partial_floats(plan.tile_rows, is_cluster, shape.head_dim);
  if (is_cluster)
    return plan.sharing_clusters > 1 ? shape.pairs() * plan.sharing_clusters * plan.row_tiles * bytes_each : 0;
  if (!shape.fixed_split) return int64_t{2} * plan.workers * plan.row_tiles * bytes_each;
  const int64_t rows = shape.q_rows * (shape.q_heads / shape.kv_heads);
  const int64_t item_rows = int64_t{plan.tile_rows} * plan.row_tiles;
  const int64_t items =
      shape.packed ? rows / item_rows + shape.batch : (rows + item_rows - 1) / item_rows * shape.batch;
  const int64_t splits = (max_kv_len + shape.fixed_split - 1) / shape.fixed_split;
  return items * shape.kv_heads * splits * plan.row_tiles * bytes_each;
}

const std::vector<KernelVariant>& kernel_variants() {
  static const std::vector<KernelVariant> variants = [] {
    std::vector<KernelVariant> all;
    const auto add = [&](Kernel kernel, int tile_rows, int head_dim, bool fp8, int occupancy = 0, int warpgroups = 0,
                         bool sharing = false) {
      all.push_back({kernel, tile_rows, head_dim, fp8, occupancy, warpgroups, sharing});
    };
    for (const int head_dim : {64, 128, 256}) {
      const bool wide = head_dim == 256;
      for (const bool fp8 : {false, true})
        for (const int tile_rows : {16, 32, 64})
          if (!wide || tile_rows < 64) add(Kernel::kMma, tile_rows, head_dim, fp8);
      for (const int occupancy : {1, 2})
        if (!wide || occupancy == 1) add(Kernel::kWgmma, 64, head_dim, false, occupancy);
      add(Kernel::kWgmma, 128, head_dim, false, 1);
      for (const int tile_rows : {64, 128}) add(Kernel::kDequantSmem, tile_rows, head_dim, true);
      for (const int tile_rows : {16, 32})
        for (const int warpgroups : {1, 2})
          if (!wide || warpgroups == 1) add(Kernel::kDequantRegisters, tile_rows, head_dim, true, 0, warpgroups);
      if (wide) {
        for (const int tile_rows : {16, 64}) add(Kernel::kCluster, tile_rows, head_dim, false);
        continue;
      }
      add(Kernel::kDequantRegisters, 64, head_dim, true, 0, 2);
      for (const bool fp8 : {false, true}) {
        add(Kernel::kCluster, 16, head_dim, fp8, 0, 0, true);
        for (const int tile_rows : {16, 64, 128}) add(Kernel::kCluster, tile_rows, head_dim, fp8);
      }
    }
    return all;
  }();
  return variants;
}

bool KernelVariant::runs(const AttentionPlan& plan, const AttentionShape& shape) const {
  return kernel == plan.kernel && tile_rows == plan.tile_rows && head_dim == shape.head_dim && fp8 == shape.fp8 &&
         (occupancy == 0 || occupancy == plan.blocks_per_sm) && (warpgroups == 0 || warpgroups == plan.warpgroups) &&
         sharing == (plan.sharing_clusters > 1);
}

std::string to_string(const KernelVariant& variant) {
  std::string name = kernel_name(variant.kernel, variant.tile_rows);
  if (variant.occupancy) name += ".occupancy" + std::to_string(variant.occupancy);
  if (variant.warpgroups) name += ".warpgroups" + std::to_string(variant.warpgroups);
  if (variant.sharing) name += ".sharing";
  return name + ".d" + std::to_string(variant.head_dim) + (variant.fp8 ? ".fp8" : "");
}

}  // namespace specdec::attention
