// Binds tree_attention, and its plan rules without tensors or a device.
#include <pybind11/stl.h>

#include <limits>

#include "attention/plan.h"
#include "attention/tree_attention.h"
#include "core/dispatch.h"
#include "core/errors.h"
#include "python/fast_op.h"
#include "python/module.h"

namespace specdec::python {
namespace {

using namespace attention;
using namespace py::literals;

// Return the fields of an AttentionPlan (plans.py) by name.
py::dict attention_plan(int64_t batch, int64_t q_rows, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                        int64_t page_size, bool packed, bool fp8, bool tensor_cores, int64_t fixed_split,
                        int64_t max_kv_len, int num_sms, bool has_wgmma, int shared_bytes_per_block,
                        int shared_bytes_per_sm, const std::optional<std::string>& name) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  Check check("attention_plan");
  check.range("batch", batch, 1, kMost);
  check.range("q_rows", q_rows, 1, kMost);
  check.range("kv_heads", kv_heads, 1, kMaxGridY);
  check.that(q_heads >= 1 && q_heads % kv_heads == 0, "q_heads", {"is ", q_heads},
             {"a multiple of kv_heads=", kv_heads});
  check.that(head_dim == 64 || head_dim == 128 || head_dim == 256, "head_dim", {"is ", head_dim}, "64, 128 or 256");
  check.range("page_size", page_size, 1, kMost);
  check.range("max_kv_len", max_kv_len, 1, kMost);
  check.that(fixed_split >= 0 && fixed_split % 128 == 0, "fixed_split", {"is ", fixed_split},
             "a positive multiple of 128");
  check.range("num_sms", num_sms, 1, kMaxWorkers);
  const AttentionShape shape{.batch = batch,
                             .q_rows = q_rows,
                             .q_heads = q_heads,
                             .kv_heads = kv_heads,
                             .head_dim = head_dim,
                             .packed = packed,
                             .fp8 = fp8,
                             .tensor_cores = tensor_cores,
                             .tma_pages = has_tma_boxes(page_size),
                             .fixed_split = fixed_split};
  const Device device{.num_sms = num_sms,
                      .is_hopper_or_later = has_wgmma,
                      .has_wgmma = has_wgmma,
                      .shared_bytes_per_block = shared_bytes_per_block,
                      .shared_bytes_per_sm = shared_bytes_per_sm};
  const AttentionPlan plan = plan_attention(check, shape, max_kv_len, device, name);
  std::string variant = "plain";
  for (const attention::KernelVariant& each : attention::kernel_variants())
    if (each.runs(plan, shape)) variant = to_string(each);
  return py::dict("name"_a = to_string(plan), "variant"_a = variant, "tile_rows"_a = plan.tile_rows,
                  "tile_tokens"_a = plan.tile_tokens, "row_tiles"_a = plan.row_tiles,
                  "blocks_per_sm"_a = plan.blocks_per_sm, "cluster_blocks"_a = plan.cluster_blocks,
                  "sharing_clusters"_a = plan.sharing_clusters, "whole_items"_a = plan.whole_items,
                  "warpgroups"_a = plan.warpgroups, "workers"_a = plan.workers,
                  "workspace_bytes"_a = workspace_bytes(plan, shape, max_kv_len));
}

// Return the properties of the current CUDA device: the fields of a Gpu (plans.py) by name.
py::dict current_gpu() {
#ifdef SPECDEC_WITH_CUDA
  const Device device = current_device("current_gpu");
  return py::dict("num_sms"_a = device.num_sms, "has_wgmma"_a = device.has_wgmma,
                  "shared_bytes_per_block"_a = device.shared_bytes_per_block,
                  "shared_bytes_per_sm"_a = device.shared_bytes_per_sm);
#else
  throw NotImplementedError("current_gpu: this build of specdec_kernels has no CUDA half, expected one that has");
#endif
}

std::vector<std::string> attention_variants() {
  std::vector<std::string> names{"plain"};
  for (const attention::KernelVariant& each : attention::kernel_variants()) names.push_back(to_string(each));
  return names;
}

}  // namespace

void add_attention(py::module_& m) {
  def_op<&tree_attention>(m, "tree_attention",
                          "stream q k_pool v_pool page_table prefix_lens slots q_lens cu_seqlens_q tail_len mask scale "
                          "window soft_cap k_scale v_scale fixed_split max_kv_len plan out lse workspace status",
                          "compute attention over a paged KV prefix and a tail of tree nodes");
  def_op<&tree_attention_workspace>(m, "tree_attention_workspace",
                                    "q k_pool page_table cu_seqlens_q fixed_split max_kv_len plan",
                                    "return the bytes of workspace that a tree_attention call needs");
  def_op<&tree_attention_plan>(m, "tree_attention_plan", "q k_pool page_table cu_seqlens_q fixed_split max_kv_len plan",
                               "return the plan that a tree_attention call runs");
  m.def("attention_plan", &attention_plan, py::kw_only(), "batch"_a, "q_rows"_a, "q_heads"_a, "kv_heads"_a,
        "head_dim"_a, "page_size"_a, "packed"_a, "fp8"_a, "tensor_cores"_a, "fixed_split"_a, "max_kv_len"_a,
        "num_sms"_a, "has_wgmma"_a, "shared_bytes_per_block"_a, "shared_bytes_per_sm"_a, "plan"_a,
        "return the plan of a shape on a GPU");
  m.def("current_gpu", &current_gpu, "return the properties of the current CUDA device that plans depend on");
  m.def("attention_variants", &attention_variants, "return the names of all tree_attention kernels");
}

}  // namespace specdec::python
