// The op tree_attention: validates its arguments, plans the call and dispatches to the CPU or CUDA implementation.
#include "attention/tree_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/errors.h"
#include "kv/pool_view.h"

namespace specdec::attention {
namespace {

constexpr int64_t kSplitMultiple = 128;  // KV rows; a multiple of every kernel's KV tile
// KV rows that a plan assumes without max_kv_len: page tables often have room for far more than the texts need. At
// 32768 rows, plans for 4096 lose at most a seventh; for short texts, plans for 32768 take up to twice as long.
constexpr int64_t kDefaultPlanTokens = 4096;

// Return the stride of a dimension, or 0 for a dimension of size 1, whose stride may be anything.
int64_t effective_stride(const TensorView& t, int i) { return t.shape(i) > 1 ? t.stride(i) : 0; }

RowStrides row_strides(const TensorView& t) {
  const int n = static_cast<int>(t.ndim());
  return {n == 4 ? effective_stride(t, 0) : 0, effective_stride(t, n - 3), effective_stride(t, n - 2)};
}

PoolStrides pool_strides(const TensorView& t) {
  return {effective_stride(t, 0), effective_stride(t, 1), effective_stride(t, 2)};
}

bool is_aligned(const TensorView& t) { return reinterpret_cast<uintptr_t>(t.data<void>()) % 16 == 0; }

bool rows_are_aligned(const TensorView& t) {
  int64_t strides = 0;
  for (int i = 0; i + 1 < t.ndim(); ++i) strides |= effective_stride(t, i) * (t.dl.dtype.bits / 8);
  return is_aligned(t) && strides % 16 == 0;
}

constexpr double kLog2e = 1.4426950408889634;

// The dimensions of a call. check() validates the arguments that a plan depends on, and fills in the params that follow
// from them.
struct Dims {
  Dim B{"batch"}, Q{"q_rows"}, Hq{"q_heads"}, Hkv{"kv_heads"}, D{"head_dim"};
  Dim P{"num_pages"}, page_size{"page_size"}, num_slots{"num_slots"}, max_pages{"max_pages"}, ends{"batch + 1"};

  PlannedAttention check(Check& check, const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                         const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                         std::optional<int64_t> max_kv_len) {
    const bool packed = cu_seqlens_q.has_value();
    if (packed)
      check.strided("q", q, {Q, Hq, D}, kFloats);
    else
      check.strided("q", q, {B, Q, Hq, D}, kFloats);
    check.range("q_rows * q_heads", Q * Hq, 0, INT32_MAX);
    check.that(D == 64 || D == 128 || D == 256, "q", "has head_dim " + std::to_string(D), "64, 128 or 256");
    check.strided("k_pool", k_pool, {P, page_size, Hkv, D}, dtype_of(q) | kFloat8);
    check.that(page_size >= 1 && page_size <= INT32_MAX, "k_pool", "has page_size " + std::to_string(page_size),
               "1 or more");
    check.that(Hkv >= 1 && Hq % Hkv == 0, "k_pool",
               "has " + std::to_string(Hkv) + " heads for the " + std::to_string(Hq) + " of q",
               "a number of heads that divides it");
    check.range("kv_heads", Hkv, 1, kMaxGridY);
    check.tensor("page_table", page_table, {num_slots, max_pages}, kInt32);
    if (packed) {
      check.tensor("cu_seqlens_q", *cu_seqlens_q, {ends}, kInt32);
      check.that(ends >= 1, "cu_seqlens_q", "is empty", "batch + 1 row offsets");
      B.value = ends - 1;
    }
    if (fixed_split && (*fixed_split <= 0 || *fixed_split % kSplitMultiple != 0))
      check.that(false, "fixed_split", "is " + std::to_string(*fixed_split), "a positive multiple of 128");
    if (max_kv_len) check.that(*max_kv_len >= 1, "max_kv_len", {"is ", *max_kv_len}, "1 or more");

    PlannedAttention p{};
    p.dtype = dtype_of(q);
    p.fp8 = dtype_of(k_pool) == kFloat8;
    p.rows = {.page_table = page_table.data<const int32_t>(),
              .page_refs = nullptr,
              .max_pages = max_pages,
              .num_pages = P,
              .page_size = page_size};
    p.cu_seqlens_q = data_or_null<const int32_t>(cu_seqlens_q);
    p.batch = B;
    p.q_rows = Q;
    p.q_heads = Hq;
    p.kv_heads = Hkv;
    p.head_dim = D;
    p.num_slots = num_slots;
    p.aligned = true;
    // No request has more rows than this.
    p.fixed_split = std::min<int64_t>(fixed_split.value_or(0), INT32_MAX / kSplitMultiple * kSplitMultiple);
    p.max_kv_len = std::min(row_capacity(p.rows), max_kv_len.value_or(INT64_MAX));
    p.planned_kv_len = std::min(p.max_kv_len, max_kv_len.value_or(kDefaultPlanTokens));
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

bool has_rows(const TreeAttentionParams& p) { return p.q_rows > 0 && p.q_heads > 0; }

void check_no_plan(const Check& check, const std::optional<std::string>& plan) {
  if (plan) check.that(false, "plan", {"is ", *plan}, "None on cpu");
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
  Dim W{"mask_words"};
  Dims n;
  const bool packed = cu_seqlens_q.has_value();
  check.that(!packed || !q_lens, "q_lens", "is given together with cu_seqlens_q", "one of the two");
  PlannedAttention params = n.check(check, q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len);
  check.strided("v_pool", v_pool, {n.P, n.page_size, n.Hkv, n.D}, dtype_of(k_pool));
  check.tensor("prefix_lens", prefix_lens, {n.num_slots}, kInt32);
  check.slots(slots, n.B, n.num_slots);
  check.tensor("q_lens", q_lens, {n.B}, kInt32);
  if (tail_len) check.range("tail_len", *tail_len, 0, INT32_MAX);
  if (packed)
    check.tensor("mask", mask, {n.Q, W}, kInt64);
  else
    check.tensor("mask", mask, {n.B, n.Q, W}, kInt64);
  const int64_t known_tail = tail_len ? *tail_len : packed ? 0 : n.Q.value;
  check.that(!mask || 64 * W >= known_tail, "mask", "has mask_words " + std::to_string(W),
             std::to_string((known_tail + 63) / 64) + " or more for a tail of " + std::to_string(known_tail));
  if (window && *window < 1) check.that(false, "window", "is " + std::to_string(*window), "1 or more");
  if (scale) check.factor("scale", *scale);  // positive, so that the highest product is the highest score
  const float cap = soft_cap ? check.factor("soft_cap", *soft_cap, kLog2e) : 0;
  const float k_factor = kv::pool_scale(check, "k_scale", k_scale, k_pool);
  const float v_factor = kv::pool_scale(check, "v_scale", v_scale, v_pool);
  if (packed) {
    check.strided_output("out", out, {n.Q, n.Hq, n.D}, params.dtype);
    check.output("lse", lse, {n.Q, n.Hq}, kFloat32);
  } else {
    check.strided_output("out", out, {n.B, n.Q, n.Hq, n.D}, params.dtype);
    check.output("lse", lse, {n.B, n.Q, n.Hq}, kFloat32);
  }
  check.output("status", status, {n.num_slots}, kInt32);
  if (!check.on_cuda()) check_no_plan(check, plan);
  check.workspace(workspace, 0);
  if (n.Q == 0 || n.Hq == 0 || (n.B == 0 && !packed)) return;

  params.q = q.data<void>();
  params.k_pool = k_pool.data<void>();
  params.v_pool = v_pool.data<void>();
  params.out = out.data<void>();
  params.q_strides = row_strides(q);
  params.out_strides = row_strides(out);
  params.k_strides = pool_strides(k_pool);
  params.v_strides = pool_strides(v_pool);
  params.prefix_lens = prefix_lens.data<const int32_t>();
  params.slots = data_or_null<const int32_t>(slots);
  params.q_lens = data_or_null<const int32_t>(q_lens);
  params.mask = data_or_null<const int64_t>(mask);
  params.lse = data_or_null<float>(lse);
  params.status = data_or_null<int32_t>(status);
  params.mask_words = mask ? W.value : 0;
  params.tail_len = tail_len.value_or(-1);
  params.window = window.value_or(INT64_MAX);
  params.log2_scale = static_cast<float>(scale.value_or(1 / std::sqrt(static_cast<double>(n.D))) * k_factor * kLog2e);
  params.soft_cap = cap;
  params.v_scale = v_factor;
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
  Dims n;
  const PlannedAttention p = n.check(check, q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len);
  if (!check.on_cuda()) check_no_plan(check, plan);
  return check.on_cuda() && has_rows(p) ? workspace_of(p, plan_of(check, p, plan)) : 0;
}

std::string tree_attention_plan(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                                std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan) {
  Check check("tree_attention");
  Dims n;
  const PlannedAttention p = n.check(check, q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len);
  if (!check.on_cuda()) check_no_plan(check, plan);
  return check.on_cuda() && has_rows(p) ? to_string(plan_of(check, p, plan)) : "cpu";
}

}  // namespace specdec::attention
