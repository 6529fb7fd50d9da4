// rope_qkv_write_kv: everything between a layer's QKV projection and attention. Applies optional q/k RMSNorm and RoPE
// to query and key heads, returns the queries, and writes keys and values to the slots' KV pages.
#pragma once

#include "core/host_device.h"
#include "core/packed_rows.h"
#include "kv/write_kv.h"

namespace specdec::layers {

struct RopeQkvWriteKvParams {
  // Where rows are written. Its k and v point at the heads of qkv; keys are not yet normalized and rotated there.
  kv::WriteKvParams write;
  kv::NewRows q;             // [batch, q_len, query_heads, head_dim] of qkv, or packed [num_rows, ..]
  char* out_q;               // as q, contiguous
  const float* cos_sin;      // [num_positions, head_dim]: head_dim / 2 cosines, then as many sines
  const int32_t* positions;  // [batch, q_len] or [num_rows]
  const void* q_norm;        // [head_dim] or null
  const void* k_norm;
  int64_t num_rows;  // of all requests
  int64_t query_heads, head_dim, num_positions;
  float eps;
};

void rope_qkv_write_kv(CallStream stream, const TensorView& qkv, const TensorView& cos_sin, const TensorView& positions,
                       const TensorView& k_pool, const TensorView& v_pool, const TensorView& page_table,
                       const TensorView& prefix_lens, int64_t row_offset, const OptTensor& slots,
                       const OptTensor& num_valid, const OptTensor& cu_seqlens_q, const OptTensor& q_norm,
                       const OptTensor& k_norm, double eps, const OptTensor& page_refs, double k_scale, double v_scale,
                       const OptTensor& status, const TensorView& out_q);

void rope_qkv_write_kv_cpu(const RopeQkvWriteKvParams& p);
void rope_qkv_write_kv_cuda(const RopeQkvWriteKvParams& p, Stream stream);

// A request and a row of it; b is -1 for rows after the last packed request.
struct RequestRow {
  int64_t b, j;
};
SD_HD RequestRow packed_request_row(const RopeQkvWriteKvParams& p, int64_t row) {
  const int64_t b = request_of_row(p.write.cu_seqlens_q, p.write.batch, row);
  return {b, b < 0 ? 0 : row - p.write.cu_seqlens_q[b]};
}

// Return the cosines and sines of a position, clamped to the table.
SD_HD const float* cos_sin_of(const RopeQkvWriteKvParams& p, int64_t position) {
  return p.cos_sin + clamp_to(position, 0, p.num_positions - 1) * p.head_dim;
}

}  // namespace specdec::layers
