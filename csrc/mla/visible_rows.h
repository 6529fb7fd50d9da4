// The latent rows that a query row attends to, and where they are stored; used by both the CPU and the CUDA kernels.
// Without index lists, attention/common/visibility.h says what is visible.
#pragma once

#include "attention/common/visibility.h"
#include "mla/mla_tree_attention.h"

namespace specdec::mla {

using attention::load_request;
using attention::Request;

// Return where a KV row is stored.
SD_HD const char* row_address(const MlaTreeAttentionParams& p, kv::KvRow at) {
  return p.kv_pool + at.page * p.page_stride + at.offset * p.row_stride;
}

// Return the end of the KV rows that index lists may name: the prefix and the whole tail.
SD_HD int32_t listed_end(const MlaTreeAttentionParams& p, const Request& r) {
  const int32_t tail = p.tail_len < 0 ? r.valid_rows : static_cast<int32_t>(p.tail_len);
  return clamp_to(attention::add_clamped(r.prefix, tail), 0, static_cast<int32_t>(p.max_kv_len));
}

// Return entry k of query row i's list: a KV row, or -1. An entry out of range adds kBadLength to `bits`.
SD_HD int32_t listed_row(const MlaTreeAttentionParams& p, const Request& r, int32_t end, int64_t i, int64_t k,
                         int32_t& bits) {
  const int32_t row = p.indices[(r.flat_row + i) * p.num_indices + k];
  if (row >= 0 && row < end) return row;
  if (row != -1) bits |= kBadLength;
  return -1;
}

}  // namespace specdec::mla
