// Binds the ops of csrc/mla, and the plan rules of mla_tree_attention without tensors or a device.
#include <pybind11/stl.h>

#include <limits>

#include "mla/mla_tree_attention.h"
#include "mla/plan.h"
#include "mla/rope_heads.h"
#include "mla/write_latent.h"
#include "python/fast_op.h"
#include "python/module.h"

namespace specdec::python {
namespace {

using namespace mla;
using namespace py::literals;

// Return the fields of an MlaPlan (plans.py) by name.
py::dict mla_plan(int64_t batch, int64_t q_rows, int64_t q_heads, int64_t latent_dim, int64_t rope_dim, bool packed,
                  bool listed, const std::string& rows, bool tensor_cores, int64_t fixed_split, int64_t max_kv_len,
                  int num_sms, bool has_wgmma, int shared_bytes_per_block, int shared_bytes_per_sm,
                  const std::optional<std::string>& name) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  Check check("mla_plan");
  check.range("batch", batch, 1, kMost);
  check.range("q_rows", q_rows, 1, kMost);
  check.range("q_heads", q_heads, 1, kMost);
  check.range("latent_dim", latent_dim, 16, kMaxLatent);
  check.range("rope_dim", rope_dim, 0, kMaxWidth - latent_dim);
  check.that(rows == "16-bit" || rows == "fp8" || rows == "656", "rows", {"is ", rows}, "16-bit, fp8 or 656");
  check.range("max_kv_len", max_kv_len, 1, kMost);
  check.that(fixed_split >= 0 && fixed_split % 128 == 0, "fixed_split", {"is ", fixed_split},
             "a positive multiple of 128");
  const MlaShape shape{.batch = batch,
                       .q_rows = q_rows,
                       .q_heads = q_heads,
                       .latent_dim = latent_dim,
                       .width = latent_dim + rope_dim,
                       .packed = packed,
                       .listed = listed,
                       .format = rows == "fp8"   ? RowFormat::kFloat8
                                 : rows == "656" ? RowFormat::k656Bytes
                                                 : RowFormat::kAsQueries,
                       .tensor_cores = tensor_cores,
                       .fixed_split = fixed_split};
  const Device device{.num_sms = num_sms,
                      .is_hopper_or_later = has_wgmma,
                      .has_wgmma = has_wgmma,
                      .shared_bytes_per_block = shared_bytes_per_block,
                      .shared_bytes_per_sm = shared_bytes_per_sm};
  const MlaPlan plan = plan_mla(check, shape, max_kv_len, device, name);
  std::string variant = "plain";
  for (const mla::KernelVariant& each : mla::kernel_variants())
    if (each.runs(plan, shape)) variant = to_string(each);
  return py::dict("name"_a = to_string(plan), "variant"_a = variant, "tile_rows"_a = plan.tile_rows,
                  "tile_tokens"_a = plan.tile_tokens, "splits"_a = plan.splits, "row_tiles"_a = plan.row_tiles,
                  "workers"_a = plan.workers, "whole_items"_a = plan.whole_items,
                  "workspace_bytes"_a = workspace_bytes(plan, shape));
}

std::vector<std::string> mla_variants() {
  std::vector<std::string> names{"plain"};
  for (const mla::KernelVariant& each : mla::kernel_variants()) names.push_back(to_string(each));
  return names;
}

}  // namespace

void add_mla(py::module_& m) {
  def_op<&write_latent>(m, "write_latent",
                        "stream x norm eps kv_pool page_table prefix_lens cos_sin positions interleaved row_offset "
                        "slots num_valid cu_seqlens_q page_refs kv_scale q q_norm q_out status",
                        "normalize, rotate and write latent rows, and normalize what queries are made of");
  def_op<&rope_heads>(m, "rope_heads", "stream x cos_sin positions interleaved out",
                      "rotate the rotated part of query heads");
  def_op<&mla_tree_attention>(m, "mla_tree_attention",
                              "stream q kv_pool page_table prefix_lens latent_dim slots q_lens cu_seqlens_q tail_len "
                              "mask indices scale window kv_scale fixed_split max_kv_len plan out lse workspace status",
                              "compute attention over a paged prefix of latent rows and a tail of tree nodes");
  def_op<&mla_tree_attention_workspace>(
      m, "mla_tree_attention_workspace",
      "q kv_pool page_table latent_dim cu_seqlens_q indices fixed_split max_kv_len plan",
      "return the bytes of workspace that a mla_tree_attention call needs");
  def_op<&mla_tree_attention_plan>(m, "mla_tree_attention_plan",
                                   "q kv_pool page_table latent_dim cu_seqlens_q indices fixed_split max_kv_len plan",
                                   "return the plan that a mla_tree_attention call runs");
  m.def("mla_plan", &mla_plan, py::kw_only(), "batch"_a, "q_rows"_a, "q_heads"_a, "latent_dim"_a, "rope_dim"_a,
        "packed"_a, "listed"_a, "rows"_a, "tensor_cores"_a, "fixed_split"_a, "max_kv_len"_a, "num_sms"_a, "has_wgmma"_a,
        "shared_bytes_per_block"_a, "shared_bytes_per_sm"_a, "plan"_a, "return the plan of a shape on a GPU");
  m.def("mla_variants", &mla_variants, "return the names of all mla_tree_attention kernels");
}

}  // namespace specdec::python
