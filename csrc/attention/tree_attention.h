// tree_attention: attention of each request's query rows over its paged KV prefix and a tail of tree nodes.
//
// Reads q, the K and V pools, page table, lengths and mask; writes out, lse and status. plan.h says which kernel runs.
#pragma once

#include "attention/plan.h"
#include "core/dispatch.h"
#include "core/floats.h"
#include "kv/page_rows.h"

namespace specdec::attention {

// Strides in elements. The head dimension itself is contiguous.
struct RowStrides {
  int64_t batch, row, head;  // batch is 0 for packed rows
};
struct PoolStrides {
  int64_t page, row, head;
};

struct TreeAttentionParams {
  const void* q;       // [batch, q_rows, q_heads, head_dim], or packed [q_rows, q_heads, head_dim]; any strides
  const void* k_pool;  // [num_pages, page_size, kv_heads, head_dim], any strides
  const void* v_pool;  // [num_pages, page_size, kv_heads, head_dim], any strides
  void* out;           // shape of q, strides of its own
  Dtypes dtype;        // of q and out
  bool fp8;            // the pools hold float8_e4m3fn; else they have dtype too
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
  int64_t window;       // a row attends to at most the last `window` rows of its path; INT64_MAX: all
  float log2_scale;     // softmax scale times log2(e) and k_scale: exponentials are powers of two
  float soft_cap;       // in the same units: scores become soft_cap * tanh(score / soft_cap); 0: none
  float v_scale;        // factor of the output
  bool aligned;         // every row of q, out and the pools is aligned to 16 bytes
  int64_t fixed_split;  // batch invariance: split KV at multiples of this many rows; 0: split evenly
  float* workspace;     // aligned to 16 bytes, workspace_bytes() of partial results; CUDA only
  int64_t max_kv_len;   // bound on a request's KV rows: what the page table has room for, or less if the caller says so
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
