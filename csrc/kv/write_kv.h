// write_kv: writes the valid rows of new K and V to the slots' pages, quantized to FP8 if the pools are FP8.
#pragma once

#include "core/check.h"
#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/floats.h"
#include "kv/page_rows.h"

namespace specdec::kv {

// Rows [tokens, heads, head_dim] of K or V; strides in bytes.
struct NewRows {
  const char* data;
  int64_t batch_stride, row_stride, head_stride;  // batch_stride is 0 for packed rows
};

// Return the rows of a tensor.
NewRows new_rows(const TensorView& t, bool packed);

struct WriteKvParams {
  NewRows k, v;  // [batch, q_len, heads, head_dim], or packed [tokens, heads, head_dim]
  PoolView k_pool, v_pool;
  PageRows rows;
  const int32_t* prefix_lens;  // [num_slots]
  int64_t row_offset;
  const int32_t* slots;         // [batch] or null
  const int32_t* num_valid;     // [batch] or null
  const int32_t* cu_seqlens_q;  // [batch + 1] or null: request b has packed rows cu_seqlens_q[b] to [b + 1] - 1
  int32_t* status;              // [num_slots] or null
  int64_t batch, q_len;         // q_len: rows per request, or all packed rows
  int64_t num_slots, heads;
  int64_t head_bytes, unit;  // bytes per head of k, and per read
  bool quantize;             // divide by a scale and convert to float8_e4m3fn; else copy bytes
  Dtypes dtype;              // of k and v
  float k_scale, v_scale;
};

// The arguments that say where an op writes K and V.
struct KvDestination {
  const TensorView &k_pool, &v_pool, &page_table, &prefix_lens;
  int64_t row_offset;
  const OptTensor &slots, &num_valid, &page_refs;
  double k_scale, v_scale;
  const OptTensor& status;

  // Check the arguments for rows of this dtype and bind sizes that are not bound yet. The caller sets the rows to
  // write.
  WriteKvParams check(Check& check, Dim& batch, Dim& heads, Dim& head_dim, Dtypes dtype) const;
};

// Quantize to FP8: x / scale, rounded to nearest even, saturated at 448.
template <class T>
SD_HD Float8 to_float8(T x, float scale) {
  return from_float<Float8>(div(to_float(x), scale));
}

void write_kv(CallStream stream, const TensorView& k, const TensorView& v, const TensorView& k_pool,
              const TensorView& v_pool, const TensorView& page_table, const TensorView& prefix_lens, int64_t row_offset,
              const OptTensor& slots, const OptTensor& num_valid, const OptTensor& cu_seqlens_q,
              const OptTensor& page_refs, double k_scale, double v_scale, const OptTensor& status);

void write_kv_cpu(const WriteKvParams& p);
void write_kv_cuda(const WriteKvParams& p, Stream stream);

// The rows that request b writes: `count` of the `present` rows from `first` of the (packed) input, after the slot's
// `start` rows.
struct RowsToWrite {
  int64_t slot = -1, first = 0, present = 0, start = 0, count = 0;
  int32_t bits = 0;
};

SD_HD RowsToWrite rows_to_write(const WriteKvParams& p, int64_t b) {
  RowsToWrite r;
  r.slot = slot_of(p.slots, b, p.num_slots);
  r.first = p.cu_seqlens_q ? p.cu_seqlens_q[b] : 0;
  r.present = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - r.first : p.q_len;
  const int64_t count = p.num_valid ? p.num_valid[b] : r.present;
  if (r.slot < 0) return r;
  const int32_t status = p.status ? p.status[r.slot] : 0;
  r.start = p.prefix_lens[r.slot];
  if (status & kStalled) return r;
  if (r.first < 0 || r.present < 0 || r.first + r.present > p.q_len || count < 0 || count > r.present || r.start < 0)
    r.bits = kBadLength;
  else
    r.count = count;
  return r;
}

SD_HD const char* row_data(const NewRows& rows, int64_t b, int64_t row) {
  return rows.data + b * rows.batch_stride + row * rows.row_stride;
}

}  // namespace specdec::kv
