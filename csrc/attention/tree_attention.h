// tree_attention: attention of each request's query rows over its paged KV prefix and a tail of tree nodes.
//
// Reads q, the K and V pools, page table, lengths and mask; writes out, lse and status. plan.h says which kernel runs.
#pragma once

#include "attention/attention_call.h"
#include "attention/plan.h"
#include "core/dispatch.h"
#include "core/floats.h"

namespace specdec::attention {

struct TreeAttentionParams : AttentionCall {  // q and out have width head_dim
  const void* k_pool;                         // [num_pages, page_size, kv_heads, head_dim], any strides
  const void* v_pool;                         // [num_pages, page_size, kv_heads, head_dim], any strides
  bool fp8;                                   // the pools hold float8_e4m3fn; else they have the dtype of q
  PoolStrides k_strides, v_strides;
  int64_t head_dim;
  float soft_cap;  // in units of log2_scale: scores become soft_cap * tanh(score / soft_cap); 0: none
  bool aligned;    // every row of q, out and the pools is aligned to 16 bytes
};

struct PlannedAttention : TreeAttentionParams {
  int64_t planned_kv_len;  // KV rows that the plan assumes: max_kv_len if it was given
  AttentionPlan plan;      // CUDA only
};

void tree_attention(CallStream stream, const TensorView& q, const TensorView& k_pool, const TensorView& v_pool,
                    const TensorView& page_table, const TensorView& prefix_lens, const OptTensor& slots,
                    const OptTensor& q_lens, const OptTensor& cu_seqlens_q, std::optional<int64_t> tail_len,
                    const OptTensor& mask, std::optional<double> scale, std::optional<int64_t> window,
                    std::optional<double> soft_cap, double k_scale, double v_scale, std::optional<int64_t> fixed_split,
                    std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan, const TensorView& out,
                    const OptTensor& lse, const OptTensor& workspace, const OptTensor& status);

// Return the bytes of workspace that a call with such tensors needs on their device.
int64_t tree_attention_workspace(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                 const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                                 std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan);

// Return the plan name of such a call; "cpu" on the CPU.
std::string tree_attention_plan(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                                std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan);

// Call f.template operator()<T, Kv>(): T is the storage type of q and out, Kv that of the KV pools.
template <class F>
void with_types(const TreeAttentionParams& p, F&& f) {
  with_float_type(p.dtype, [&]<class T>() {
    if (p.fp8)
      f.template operator()<T, Float8>();
    else
      f.template operator()<T, T>();
  });
}

void tree_attention_cpu(const TreeAttentionParams& p);
void tree_attention_cuda(const PlannedAttention& p, Stream stream);

}  // namespace specdec::attention
