// tree_attention: attention of each request's query rows over its paged KV prefix and a tail of tree nodes.
#pragma once

#include "attention/plan.h"
#include "core/dispatch.h"
#include "core/floats.h"
#include "kv/page_rows.h"

namespace specdec::attention {

// In elements. The head dimension itself is contiguous.
struct RowStrides {
  int64_t batch, row, head;  // batch is 0 for packed rows
};
struct PoolStrides {
  int64_t page, row, head;
};

struct TreeAttentionParams {
  const void* q;       // [batch, q_rows, q_heads, head_dim], or packed [q_rows, q_heads, head_dim]; free strides
  const void* k_pool;  // [num_pages, page_size, kv_heads, head_dim], free strides
  const void* v_pool;  // [num_pages, page_size, kv_heads, head_dim], free strides
  void* out;           // as q, of its own strides
  Dtypes dtype;        // of q and out
  bool fp8;            // the pools hold float8_e4m3fn; else they are of dtype too
  RowStrides q_strides, out_strides;
  PoolStrides k_strides, v_strides;
  kv::PageRows rows;
  const int32_t* prefix_lens;   // [num_slots]
  const int32_t* slots;         // [batch] or null
  const int32_t* q_lens;        // [batch] or null; padded rows only
  const int32_t* cu_seqlens_q;  // [batch + 1] for packed rows, else null
  const int64_t* mask;          // [batch, q_rows, mask_words], packed [q_rows, mask_words], or null: causal chain
  float* lse;                   // [batch, q_rows, q_heads], packed [q_rows, q_heads], or null; natural logarithm
  int32_t* status;              // [num_slots] or null
  int64_t batch, q_rows, q_heads, kv_heads, head_dim;
  int64_t num_slots, mask_words;
  int64_t tail_len;     // -1: each request's number of valid rows
  int64_t window;       // a row sees the last `window` rows of its path at most; INT64_MAX: all
  float log2_scale;     // of q.k, with log2(e) in it: exponentials are powers of two
  float soft_cap;       // in the same units, scores become soft_cap * tanh(score / soft_cap); 0: they stay
  float v_scale;        // of the weighted sum of values
  bool aligned;         // every row of q, out and the pools starts on 16 bytes
  int64_t fixed_split;  // split KV at multiples of so many rows, whatever else is in the batch; 0: evenly
  float* workspace;     // on 16 bytes, workspace_bytes() of partial results; CUDA only
  int64_t max_kv_len;   // KV rows that a request has at most: the table's room, or less where the caller knows
};

struct PlannedAttention : TreeAttentionParams {
  int64_t planned_kv_len;  // KV rows that the plan is made for: max_kv_len where it was given
  AttentionPlan plan;      // CUDA only
};

void tree_attention(CallStream stream, const TensorView& q, const TensorView& k_pool, const TensorView& v_pool,
                    const TensorView& page_table, const TensorView& prefix_lens, const OptTensor& slots,
                    const OptTensor& q_lens, const OptTensor& cu_seqlens_q, std::optional<int64_t> tail_len,
                    const OptTensor& mask, std::optional<double> scale, std::optional<int64_t> window,
                    std::optional<double> soft_cap, double k_scale, double v_scale, std::optional<int64_t> fixed_split,
                    std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan, const TensorView& out,
                    const OptTensor& lse, const OptTensor& workspace, const OptTensor& status);

// Bytes of workspace that a call with such tensors needs on their device.
int64_t tree_attention_workspace(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                 const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                                 std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan);

// The name of the plan of such a call, on the CPU "cpu".
std::string tree_attention_plan(const TensorView& q, const TensorView& k_pool, const TensorView& page_table,
                                const OptTensor& cu_seqlens_q, std::optional<int64_t> fixed_split,
                                std::optional<int64_t> max_kv_len, const std::optional<std::string>& plan);

// Calls f.template operator()<T, Kv>() with the storage types of q and out, and of the pools.
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
