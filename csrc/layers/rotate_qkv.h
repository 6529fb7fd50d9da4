// rotate_qkv: what a layer does between its query-key-value product and attention. Normalises and rotates the query and
// key heads of every row, and writes keys and values into the slots' pages.
#pragma once

#include "core/clamp.h"
#include "kv/write_kv.h"

namespace specdec {

struct RotateQkvParams {
  // Where rows go: k and v are the heads of qkv, of which keys are not yet what is written.
  WriteKvParams write;
  NewRows q;                 // [batch, q_len, query_heads, head_dim] of qkv
  char* out_q;               // [batch, q_len, query_heads, head_dim], contiguous
  const float* rotations;    // [num_positions, head_dim]: cosines of head_dim / 2 frequencies, then sines
  const int32_t* positions;  // [batch, q_len]
  const void* q_norm;        // [head_dim] or null
  const void* k_norm;
  int64_t query_heads, head_dim, num_positions;
  float eps;
};

void rotate_qkv(CallStream stream, const TensorView& qkv, const TensorView& rotations, const TensorView& positions,
                const TensorView& k_pool, const TensorView& v_pool, const TensorView& page_table,
                const TensorView& start_lens, int64_t row_offset, const OptTensor& slots, const OptTensor& num_valid,
                const OptTensor& q_norm, const OptTensor& k_norm, double eps, const OptTensor& page_refs,
                double k_scale, double v_scale, const OptTensor& status, const TensorView& out_q);

void rotate_qkv_cpu(const RotateQkvParams& p);
void rotate_qkv_cuda(const RotateQkvParams& p, Stream stream);

// The rotation of a position; one outside the table takes the nearest there is.
SD_HD const float* rotation_of(const RotateQkvParams& p, int64_t position) {
  return p.rotations + clamp_to(position, 0, p.num_positions - 1) * p.head_dim;
}

}  // namespace specdec
