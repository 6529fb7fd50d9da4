// AttentionCall: what a call of attention over paged rows has, whatever its pools hold.
//
// The functions in common/ that need no pool take it: which KV rows a query row attends to, how the work is divided,
// how partial results are merged.
#pragma once

#include "core/check.h"
#include "kv/page_rows.h"

namespace specdec::attention {

// Strides in elements. The last dimension itself is contiguous.
struct RowStrides {
  int64_t batch, row, head;  // batch is 0 for packed rows
};
struct PoolStrides {
  int64_t page, row, head;
};

struct AttentionCall {
  const void* q;  // [batch, q_rows, q_heads, width], or packed [q_rows, q_heads, width]; any strides
  void* out;      // [batch, q_rows, q_heads, out width], or packed; strides of its own
  Dtypes dtype;   // of q and out
  RowStrides q_strides, out_strides;
  kv::PageRows rows;
  const int32_t* prefix_lens;   // [num_slots]
  const int32_t* slots;         // [batch] or null
  const int32_t* q_lens;        // [batch] or null; padded rows only
  const int32_t* cu_seqlens_q;  // [batch + 1] for packed rows, else null
  const int64_t* mask;          // [batch, q_rows, mask_words], packed [q_rows, mask_words], or null: causal chain
  float* lse;                   // [batch, q_rows, q_heads], packed [q_rows, q_heads], or null; natural logarithm
  int32_t* status;              // [num_slots] or null
  int64_t batch, q_rows, q_heads, kv_heads;
  int64_t num_slots, mask_words;
  int64_t tail_len;     // -1: each request's number of valid rows
  int64_t window;       // a row attends to at most the last `window` rows of its path; INT64_MAX: all
  float log2_scale;     // softmax scale times log2(e) and the scale of K: exponentials are powers of two
  float v_scale;        // factor of the output
  int64_t fixed_split;  // batch invariance: split KV at multiples of this many rows; 0: split evenly
  float* workspace;     // aligned to 16 bytes, with room for partial results; CUDA only
  int64_t max_kv_len;   // bound on a request's KV rows: what the page table has room for, or less if the caller says so
};

}  // namespace specdec::attention
