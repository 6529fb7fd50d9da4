// Choose, name and check the plans of mla_tree_attention (plan.h). The rules are in plan_sm*.cpp.
#include "mla/plan.h"

#include <algorithm>
#include <string_view>

#include "attention/plan.h"
#include "attention/plan_name.h"
#include "mla/plan_rules.h"

namespace specdec::mla {
namespace {

constexpr int kMaxSplits = 128;
// Splits that the rules choose at most: one block merges all partial results of a row tile.
constexpr int most_splits(int tile_rows) { return std::min(64, 2048 / tile_rows); }

std::string kernel_name(Kernel kernel, int tile_rows) {
  if (kernel == Kernel::kPlain) return "plain";
  return (kernel == Kernel::kWgmma ? "sm90.wgmma." : "sm80.mma.") + std::to_string(tile_rows);
}

PlanOptions parse_plan_name(const Check& check, const std::string& name) {
  PlanOptions options;
  const std::string_view rest = attention::parse_kernel(check, name, kernel_variants(), kernel_name, options);
  if (rest.empty()) return options;
  if (options.kernel == Kernel::kWgmma) {
    check.that(rest == ".split" || rest == ".whole", "plan", "is " + name, "option split or whole");
    options.whole_items = rest == ".whole";
    return options;
  }
  constexpr std::string_view kSplits = ".splits";
  if (rest.substr(0, kSplits.size()) == kSplits) options.splits = attention::parse_number(rest.substr(kSplits.size()));
  check.that(options.splits.has_value(), "plan", "is " + name, "options of splits<number>");
  return options;
}

bool can_use_tensor_cores(const MlaShape& shape, const Device& device) {
  return can_use_wgmma(shape, device) || (shape.tensor_cores && largest_tile_sm80(device) > 0);
}

// Throw unless a forced plan can run.
void check_plan(const Check& check, const std::string& name, const MlaPlan& plan, const MlaShape& shape,
                const Device& device) {
  const auto that = [&](bool ok, const std::string& expected) { check.that(ok, "plan", "is " + name, expected); };
  that(can_use_tensor_cores(shape, device), "plain where tensor cores cannot be used");
  if (plan.kernel == Kernel::kWgmma) {
    that(can_use_wgmma(shape, device), "plain or a plan of sm80 for this shape on this device");
    return;
  }
  that(plan.tile_rows <= largest_tile_sm80(device),
       "a row tile of at most " + std::to_string(largest_tile_sm80(device)) + " on this device");
  that(plan.splits >= 1 && plan.splits <= kMaxSplits, "1 to 128 splits");
}

}  // namespace

void set_splits(MlaPlan& plan, const MlaShape& shape, int64_t max_kv_len, int64_t blocks, const PlanOptions& forced) {
  const auto up = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  if (shape.fixed_split) {
    plan.splits = static_cast<int>(std::clamp<int64_t>(up(max_kv_len, shape.fixed_split), 1, INT32_MAX));
    return;
  }
  const int64_t wanted = blocks / std::max<int64_t>(shape.row_tiles(plan.tile_rows), 1);
  plan.splits = forced.splits.value_or(static_cast<int>(
      std::clamp<int64_t>(std::min(wanted, up(max_kv_len, kMinSplitTokens)), 1, most_splits(plan.tile_rows))));
}

MlaPlan plan_mla(const Check& check, const MlaShape& shape, int64_t max_kv_len, const Device& device,
                 const std::optional<std::string>& name) {
  const PlanOptions forced = name ? parse_plan_name(check, *name) : PlanOptions{};
  if (forced.kernel == Kernel::kPlain || (!name && !can_use_tensor_cores(shape, device))) return {};
  check.that(!forced.splits || !shape.fixed_split, "plan", {"is ", name ? *name : ""},
             "one without splits with fixed_split");
  const bool sm90 = forced.kernel ? forced.kernel == Kernel::kWgmma : can_use_wgmma(shape, device);
  const MlaPlan plan = (sm90 ? plan_sm90 : plan_sm80)(shape, max_kv_len, device, forced);
  check.that(!forced.whole_items.value_or(false) || plan.whole_items, "plan", {"is ", name ? *name : ""},
             "split for packed rows, more than 320 rows of a request, or fixed_split");
  if (name) check_plan(check, *name, plan, shape, device);
  return plan;
}

std::string to_string(const MlaPlan& plan) {
  std::string name = kernel_name(plan.kernel, plan.tile_rows);
  if (plan.kernel == Kernel::kPlain) return name;
  if (plan.kernel == Kernel::kWgmma) return name + (plan.whole_items ? ".whole" : ".split");
  return name + ".splits" + std::to_string(plan.splits);
}

int64_t workspace_bytes(const MlaPlan& plan, const MlaShape& shape) {
  if (plan.kernel == Kernel::kWgmma) {
    if (plan.whole_items) return 0;
    const int64_t bytes_each = plan.row_tiles * attention::partial_floats(plan.tile_rows, false, shape.latent_dim) * 4;
    if (!shape.fixed_split) return 2 * plan.workers * bytes_each;
    return shape.row_tiles(plan.tile_rows * plan.row_tiles) * plan.splits * bytes_each;
  }
  if (plan.splits == 1) return 0;
  const int64_t tiles = shape.row_tiles(plan.tile_rows);
  return (tiles + 1) / 2 * 16 + tiles * plan.splits * partial_floats(plan.tile_rows, shape.latent_dim) * 4;
}

const std::vector<KernelVariant>& kernel_variants() {
  static const std::vector<KernelVariant> variants = [] {
    std::vector<KernelVariant> all;
    for (const RowFormat format : {RowFormat::kAsQueries, RowFormat::kFloat8, RowFormat::k656Bytes}) {
      for (const int tile_rows : {16, 32, 64}) all.push_back({Kernel::kMma, tile_rows, 32, format});
      all.push_back({Kernel::kWgmma, 64, 64, format});
    }
    return all;
  }();
  return variants;
}

std::string to_string(const KernelVariant& variant) {
  return kernel_name(variant.kernel, variant.tile_rows) + (variant.format == RowFormat::kFloat8     ? ".fp8"
                                                           : variant.format == RowFormat::k656Bytes ? ".656"
                                                                                                    : "");
}

}  // namespace specdec::mla
