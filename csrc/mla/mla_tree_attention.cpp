// The op mla_tree_attention: validates its arguments, plans the call and dispatches to the CPU or CUDA implementation.
#include "mla/mla_tree_attention.h"

#include "attention/call_check.h"
#include "kv/pool_view.h"

namespace specdec::mla {
namespace {

using attention::check_no_plan;
using attention::has_rows;

struct LatentCheck : attention::CallCheck {
  Dim width{"width"}, K{"num_indices"};

  using CallCheck::CallCheck;
  // Check the arguments that a plan depends on, and return the params that follow from them.
  MlaTreeAttentionParams planned_part(const TensorView& q, const TensorView& kv_pool, const TensorView& page_table,
                                      int64_t latent_dim, const OptTensor& cu_seqlens_q, const OptTensor& indices,
                                      std::optional<int64_t> fixed_split, std::optional<int64_t> max_kv_len) {
    queries(q, width);
    check.that(latent_dim >= 16 && latent_dim <= kMaxLatent && latent_dim % 16 == 0, "latent_dim", {"is ", latent_dim},
               "a multiple of 16 from 16 to 512");
    check.that(width >= latent_dim && width <= kMaxWidth && width % 16 == 0, "q", {"has width ", width},
               {"a multiple of 16 from latent_dim=", latent_dim, " to 576"});
    const bool has_656 = dtype_of(kv_pool) == kUInt8;
    if (has_656) {
      check.strided("kv_pool", kv_pool, {P, page_size, Row656::kBytes}, kUInt8);
      check.that(latent_dim == Row656::kLatent && width == Row656::kLatent + Row656::kRope, "kv_pool",
                 {"has rows of 656 bytes for latent_dim=", latent_dim, " and width=", width}, "512 and 576");
      check.that(attention::rows_are_aligned(kv_pool), "kv_pool", "has rows of 656 bytes that are not aligned",
                 "rows aligned to 16 bytes");
    } else {
      check.strided("kv_pool", kv_pool, {P, page_size, width}, dtype_of(q) | kFloat8);
    }
    pages("kv_pool");

    MlaTreeAttentionParams p{};
    lengths(p, q, page_table, cu_seqlens_q, fixed_split, max_kv_len);
    if (packed)
      check.tensor("indices", indices, {Q, K}, kInt32);
    else
      check.tensor("indices", indices, {B, Q, K}, kInt32);
    p.format = has_656                        ? RowFormat::k656Bytes
               : dtype_of(kv_pool) == kFloat8 ? RowFormat::kFloat8
                                              : RowFormat::kAsQueries;
    p.kv_heads = 1;
    p.latent_dim = latent_dim;
    p.width = width;
    p.indices = data_or_null<const int32_t>(indices);
    p.num_indices = indices ? K.value : 0;
    p.aligned = true;
    if (indices) planned_kv_len = K;
    return p;
  }
};

// Kernels address KV rows in units of 16 bytes, as 32-bit offsets.
constexpr int64_t kMaxSpan = int64_t{16} << 32;

MlaShape mla_shape(const MlaTreeAttentionParams& p) {
  // The shared key of a row of 656 bytes is bfloat16, which float16 cannot hold.
  const bool exact = p.format != RowFormat::k656Bytes || p.dtype == kBFloat16;
  return {.batch = p.batch,
          .q_rows = p.q_rows,
          .q_heads = p.q_heads,
          .latent_dim = p.latent_dim,
          .width = p.width,
          .packed = p.cu_seqlens_q != nullptr,
          .listed = p.indices != nullptr,
          .format = p.format,
          .tensor_cores = p.dtype != kFloat32 && p.aligned && exact && p.rows.num_pages * p.page_stride <= kMaxSpan,
          .fixed_split = p.fixed_split};
}

// Return the plan of a call on a GPU that has rows.
MlaPlan plan_of(const LatentCheck& n, const MlaTreeAttentionParams& p, const std::optional<std::string>& name) {
  // With fixed_split every row that a request may have needs its split.
  const int64_t max_kv_len = p.fixed_split && !p.indices ? p.max_kv_len : n.planned_kv_len;
  return plan_mla(n.check, mla_shape(p), max_kv_len, device_of(n.check), name);
}

}  // namespace

void mla_tree_attention(CallStream stream, const TensorView& q, const TensorView& kv_pool, const TensorView& page_table,
                        const TensorView& prefix_lens, int64_t latent_dim, const OptTensor& slots,
                        const OptTensor& q_lens, const OptTensor& cu_seqlens_q, std::optional<int64_t> tail_len,
                        const OptTensor& mask, const OptTensor& indices, double scale, std::optional<int64_t> window,
                        double kv_scale, std::optional<int64_t> fixed_split, std::optional<int64_t> max_kv_len,
                        const std::optional<std::string>& plan, const TensorView& out, const OptTensor& lse,
                        const OptTensor& workspace, const OptTensor& status) {
  Check check("mla_tree_attention");
  LatentCheck n(check, cu_seqlens_q);
  MlaTreeAttentionParams params =
      n.planned_part(q, kv_pool, page_table, latent_dim, cu_seqlens_q, indices, fixed_split, max_kv_len);
  n.rows(params, q, prefix_lens, slots, q_lens, tail_len, mask, window);
  check.that(!indices || !mask, "mask", "is given together with indices", "one of the two");
  check.that(!indices || !window, "window", "is given together with indices", "one of the two");
  check.factor("scale", scale);  // positive, so that the highest product is the highest score
  const float kv_factor = kv::pool_scale(check, "kv_scale", kv_scale, kv_pool);
  Dim value_dim{"latent_dim", latent_dim};
  n.outputs(params, out, value_dim, lse, status);
  if (!check.on_cuda()) check_no_plan(check, plan);
  check.workspace(workspace, 0);
  if (n.is_empty()) return;

  params.kv_pool = bytes(kv_pool);
  params.page_stride = attention::effective_stride(kv_pool, 0) * item_bytes(kv_pool);
  params.row_stride = attention::effective_stride(kv_pool, 1) * item_bytes(kv_pool);
  params.log2_scale = static_cast<float>(scale * kv_factor * attention::kLog2e);
  params.v_scale = kv_factor;
  params.aligned =
      attention::rows_are_aligned(kv_pool) && attention::rows_are_aligned(q) && attention::rows_are_aligned(out);
  if (check.on_cuda()) {
    params.plan = plan_of(n, params, plan);
    params.workspace = static_cast<float*>(check.workspace(workspace, workspace_bytes(params.plan, mla_shape(params))));
  }
  SD_DISPATCH(check, stream, mla_tree_attention, params);
}

int64_t mla_tree_attention_workspace(const TensorView& q, const TensorView& kv_pool, const TensorView& page_table,
                                     int64_t latent_dim, const OptTensor& cu_seqlens_q, const OptTensor& indices,
                                     std::optional<int64_t> fixed_split, std::optional<int64_t> max_kv_len,
                                     const std::optional<std::string>& plan) {
  Check check("mla_tree_attention");
  LatentCheck n(check, cu_seqlens_q);
  const MlaTreeAttentionParams p =
      n.planned_part(q, kv_pool, page_table, latent_dim, cu_seqlens_q, indices, fixed_split, max_kv_len);
  if (!check.on_cuda()) check_no_plan(check, plan);
  return check.on_cuda() && has_rows(p) ? workspace_bytes(plan_of(n, p, plan), mla_shape(p)) : 0;
}

std::string mla_tree_attention_plan(const TensorView& q, const TensorView& kv_pool, const TensorView& page_table,
                                    int64_t latent_dim, const OptTensor& cu_seqlens_q, const OptTensor& indices,
                                    std::optional<int64_t> fixed_split, std::optional<int64_t> max_kv_len,
                                    const std::optional<std::string>& plan) {
  Check check("mla_tree_attention");
  LatentCheck n(check, cu_seqlens_q);
  const MlaTreeAttentionParams p =
      n.planned_part(q, kv_pool, page_table, latent_dim, cu_seqlens_q, indices, fixed_split, max_kv_len);
  if (!check.on_cuda()) check_no_plan(check, plan);
  return check.on_cuda() && has_rows(p) ? to_string(plan_of(n, p, plan)) : "cpu";
}

}  // namespace specdec::mla
