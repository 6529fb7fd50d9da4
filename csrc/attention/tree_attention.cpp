// The op tree_attention: validates its arguments, plans the call and dispatches to the CPU or CUDA implementation.
#include "attention/tree_attention.h"

#include <cmath>
#include <cstdint>

#include "attention/call_check.h"
#include "core/errors.h"
#include "kv/pool_view.h"

namespace specdec::attention {
namespace {

struct TreeCheck : CallCheck {
  Dim Hkv{"kv_heads"}, D{"head_dim"};

  using CallCheck::CallCheck;
  // Check the arguments that a plan depends on, and return the params that follow from them.
  PlannedAttention planned_part(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                                std::optional<int64_t> max_kv_len) {
    queries(q, D);
    check.that(D == 64 || D == 128 || D == 256, "q", "has head_dim " + std::to_string(D), "64, 128 or 256");
    check.strided("k_pool", k_pool, {P, page_size, Hkv, D}, dtype_of(q) | kFloat8);
    pages("k_pool");
    check.that(Hkv >= 1 && Hq % Hkv == 0, "k_pool",
               "has " + std::to_string(Hkv) + " heads for the " + std::to_string(Hq) + " of q",
               "a number of heads that divides it");
    check.range("kv_heads", Hkv, 1, kMaxGridY);
    PlannedAttention p{};
    lengths(p, q, page_table, cu_seqlens_q, fixed_split, max_kv_len);
    p.fp8 = dtype_of(k_pool) == kFloat8;
    p.kv_heads = Hkv;
    p.head_dim = D;
    p.aligned = true;
    p.planned_kv_len = planned_kv_len;
    return p;
  }
};

// Return the bytes from the first element of a pool to the last.
int64_t span_bytes(const PoolStrides& s, const TreeAttentionParams& p) {
  return (p.fp8 ? 1 : 2) * (p.rows.num_pages * s.page + p.rows.page_size * s.row + p.kv_heads * s.head);
}

AttentionShape attention_shape(const TreeAttentionParams& p) {
  // Kernels address KV rows in units of 16 bytes, as 32-bit offsets.
  constexpr int64_t kMaxSpan = int64_t{16} << 32;
  const bool tensor_cores = p.dtype != kFloat32 && p.aligned && span_bytes(p.k_strides, p) <= kMaxSpan &&
                            span_bytes(p.v_strides, p) <= kMaxSpan;
  return {.batch = p.batch,
          .q_rows = p.q_rows,
          .q_heads = p.q_heads,
          .kv_heads = p.kv_heads,
          .head_dim = p.head_dim,
          .packed = p.cu_seqlens_q != nullptr,
          .fp8 = p.fp8,
          .tensor_cores = tensor_cores,
          .tma_pages = has_tma_boxes(p.rows.page_size),
          .fixed_split = p.fixed_split};
}

// Return the plan of a call on a GPU that has rows.
AttentionPlan plan_of(const Check& check, const PlannedAttention& p, const std::optional<std::string>& name) {
  return plan_attention(check, attention_shape(p), p.planned_kv_len, device_of(check), name);
}

int64_t workspace_of(const TreeAttentionParams& p, const AttentionPlan& plan) {
  return workspace_bytes(plan, attention_shape(p), p.max_kv_len);
}

}  // namespace

void tree_attention(CallStream stream, const TensorView& q, const TensorView& k_pool, const TensorView& v_pool,
                    const TensorView& page_table, const TensorView& prefix_lens, const OptTensor& slots,
                    const OptTensor& q_lens, const OptTensor& cu_seqlens_q, std::optional<int64_t> tail_len,
                    const OptTensor& mask, std::optional<double> scale, std::optional<int64_t> window,
                    std::optional<double> soft_cap, double k_scale, double v_scale, std::optional<int64_t> fixed_split,
                    std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan, const TensorView& out,
                    const OptTensor& lse, const OptTensor& workspace, const OptTensor& status) {
  Check check("tree_attention");
  TreeCheck n(check, cu_seqlens_q);
  PlannedAttention params = n.planned_part(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len);
  check.strided("v_pool", v_pool, {n.P, n.page_size, n.Hkv, n.D}, dtype_of(k_pool));
  n.rows(params, q, prefix_lens, slots, q_lens, tail_len, mask, window);
  if (scale) check.factor("scale", *scale);  // positive, so that the highest product is the highest score
  params.soft_cap = soft_cap ? check.factor("soft_cap", *soft_cap, kLog2e) : 0;
  const float k_factor = kv::pool_scale(check, "k_scale", k_scale, k_pool);
  params.v_scale = kv::pool_scale(check, "v_scale", v_scale, v_pool);
  n.outputs(params, out, n.D, lse, status);
  if (!check.on_cuda()) check_no_plan(check, plan);
  check.workspace(workspace, 0);
  if (n.is_empty()) return;

  params.k_pool = k_pool.data<void>();
  params.v_pool = v_pool.data<void>();
  params.k_strides = pool_strides(k_pool);
  params.v_strides = pool_strides(v_pool);
  params.log2_scale = static_cast<float>(scale.value_or(1 / std::sqrt(static_cast<double>(n.D))) * k_factor * kLog2e);
  params.aligned = rows_are_aligned(k_pool) && rows_are_aligned(v_pool) && rows_are_aligned(q) && rows_are_aligned(out);
  if (check.on_cuda()) {
    params.plan = plan_of(check, params, plan);
    params.workspace = static_cast<float*>(check.workspace(workspace, workspace_of(params, params.plan)));
  }
  SD_DISPATCH(check, stream, tree_attention, params);
}

int64_t tree_attention_workspace(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                 const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                                 std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan) {
  Check check("tree_attention");
  TreeCheck n(check, cu_seqlens_q);
  const PlannedAttention p = n.planned_part(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len);
  if (!check.on_cuda()) check_no_plan(check, plan);
  return check.on_cuda() && has_rows(p) ? workspace_of(p, plan_of(check, p, plan)) : 0;
}

std::string tree_attention_plan(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                                std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan) {
  Check check("tree_attention");
  TreeCheck n(check, cu_seqlens_q);
  const PlannedAttention p = n.planned_part(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len);
  if (!check.on_cuda()) check_no_plan(check, plan);
  return check.on_cuda() && has_rows(p) ? to_string(plan_of(check, p, plan)) : "cpu";
}

}  // namespace specdec::attention
