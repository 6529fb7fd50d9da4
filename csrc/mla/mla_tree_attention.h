// mla_tree_attention: attention of each request's query rows over paged latent rows, a prefix and a tail of tree nodes,
// in the absorbed form of multi-head latent attention.
//
// As tree_attention with one KV head whose values are the beginning of its keys, so each latent row is read once.
// Reads q, the pool, page table, lengths, and mask or index lists; writes out, lse and status. plan.h says which kernel
// runs.
#pragma once

#include "attention/attention_call.h"
#include "core/dispatch.h"
#include "mla/latent_row.h"
#include "mla/plan.h"

namespace specdec::mla {

struct MlaTreeAttentionParams : attention::AttentionCall {  // q has width `width`, out latent_dim; kv_heads is 1
  const char* kv_pool;                                      // [num_pages, page_size] latent rows, any strides
  RowFormat format;
  int64_t page_stride, row_stride;  // of the pool, in bytes
  int64_t latent_dim, width;        // elements of the value and of the key
  // Index lists, [batch, q_rows, num_indices] or packed [q_rows, num_indices], or null: each query row attends to the
  // KV rows of its list, and mask is null. -1: no row.
  const int32_t* indices;
  int64_t num_indices;
  bool aligned;  // every row of q, out and the pool is aligned to 16 bytes
  MlaPlan plan;  // CUDA only
};

void mla_tree_attention(CallStream stream, const TensorView& q, const TensorView& kv_pool, const TensorView& page_table,
                        const TensorView& prefix_lens, int64_t latent_dim, const OptTensor& slots,
                        const OptTensor& q_lens, const OptTensor& cu_seqlens_q, std::optional<int64_t> tail_len,
                        const OptTensor& mask, const OptTensor& indices, double scale, std::optional<int64_t> window,
                        double kv_scale, std::optional<int64_t> fixed_split, std::optional<int64_t> max_kv_len,
                        const std::optional<std::string>& plan, const TensorView& out, const OptTensor& lse,
                        const OptTensor& workspace, const OptTensor& status);

// Return the bytes of workspace that a call with such tensors needs on their device.
int64_t mla_tree_attention_workspace(const TensorView& q, const TensorView& kv_pool, const TensorView& page_table,
                                     int64_t latent_dim, const OptTensor& cu_seqlens_q, const OptTensor& indices,
                                     std::optional<int64_t> fixed_split, std::optional<int64_t> max_kv_len,
                                     const std::optional<std::string>& plan);

// Return the plan name of such a call; "cpu" on the CPU.
std::string mla_tree_attention_plan(const TensorView& q, const TensorView& kv_pool, const TensorView& page_table,
                                    int64_t latent_dim, const OptTensor& cu_seqlens_q, const OptTensor& indices,
                                    std::optional<int64_t> fixed_split, std::optional<int64_t> max_kv_len,
                                    const std::optional<std::string>& plan);

// Call f.template operator()<T, Row>(): T is the storage type of q and out, Row that of the pool's elements, or Row656.
template <class F>
void with_row_types(const MlaTreeAttentionParams& p, F&& f) {
  with_float_type(p.dtype, [&]<class T>() {
    if (p.format == RowFormat::kFloat8) return f.template operator()<T, Float8>();
    if (p.format == RowFormat::k656Bytes) return f.template operator()<T, Row656>();
    f.template operator()<T, T>();
  });
}

void mla_tree_attention_cpu(const MlaTreeAttentionParams& p);
void mla_tree_attention_cuda(const MlaTreeAttentionParams& p, Stream stream);

}  // namespace specdec::mla
