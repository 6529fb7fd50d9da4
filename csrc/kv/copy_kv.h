// copy_kv: copies rows of one slot to the same rows of another, in every layer.
#pragma once

#include "core/dispatch.h"
#include "kv/layer_pools.h"

namespace specdec::kv {

struct CopyKvParams {
  LayerPools pools;
  PageRows rows;
  const int32_t* src_slots;    // [batch]
  const int32_t* dst_slots;    // [batch]
  const int32_t* prefix_lens;  // [num_slots]: of the destination; copied rows end here
  const int32_t* num_rows;     // [batch]
  int32_t* status;             // [num_slots] or null
  int64_t batch, num_slots;
};

void copy_kv(CallStream stream, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table,
             const TensorView& src_slots, const TensorView& dst_slots, const TensorView& prefix_lens,
             const TensorView& num_rows, const OptTensor& page_refs, const OptTensor& status);

void copy_kv_cpu(const CopyKvParams& p);
void copy_kv_cuda(const CopyKvParams& p, Stream stream);

// The rows that request b copies: first .. first + count - 1.
struct RowsToCopy {
  int64_t src, dst, first = 0, count = 0;
  int32_t bits = 0;  // for the destination's status
};

SD_HD RowsToCopy rows_to_copy(const CopyKvParams& p, int64_t b) {
  RowsToCopy rows{.src = slot_of(p.src_slots, b, p.num_slots), .dst = slot_of(p.dst_slots, b, p.num_slots)};
  const int64_t count = p.num_rows[b];
  if (rows.src < 0 || rows.dst < 0) return rows;
  const int32_t status = p.status ? p.status[rows.dst] : 0;
  const int64_t end = p.prefix_lens[rows.dst];
  if (status & kStalled) return rows;
  if (count < 0 || end < count || end > row_capacity(p.rows)) {
    rows.bits = kBadLength;
  } else {
    rows.first = end - count;
    rows.count = count;
  }
  return rows;
}

// One row's source and destination. Nonzero bits, for the destination's status, say why the row is skipped.
struct RowCopy {
  KvRow from, to;
  int32_t bits = 0;
};

template <class Divmod>
SD_HD RowCopy find_copy(const CopyKvParams& p, const Divmod& page_size, const RowsToCopy& rows, int64_t j) {
  RowCopy copy{.from = find_row(p.rows, page_size, rows.src, rows.first + j),
               .to = find_own_row(p.rows, page_size, rows.dst, rows.first + j)};
  copy.bits = copy.from.bits | copy.to.bits;
  return copy;
}

}  // namespace specdec::kv
