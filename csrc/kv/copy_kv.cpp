#include "kv/copy_kv.h"

namespace specdec::kv {

void copy_kv(CallStream stream, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table,
             const TensorView& src_slots, const TensorView& dst_slots, const TensorView& prefix_lens,
             const TensorView& num_rows, const OptTensor& page_refs, const OptTensor& status) {
  Check check("copy_kv");
  Dim B{"batch"};
  PagedLayers pools;
  pools.check(check, k_pools, v_pools, page_table);
  check.tensor("src_slots", src_slots, {B}, kInt32);
  check.tensor("dst_slots", dst_slots, {B}, kInt32);
  check.tensor("prefix_lens", prefix_lens, {pools.slots}, kInt32);
  check.tensor("num_rows", num_rows, {B}, kInt32);
  check.tensor("page_refs", page_refs, {pools.pages}, kInt32);
  check.output("status", status, {pools.slots}, kInt32);
  if (B == 0 || pools.layers == 0) return;

  const CopyKvParams params{
      .pools = layer_pools(k_pools, v_pools),
      .rows = pools.rows(page_table, page_refs),
      .src_slots = src_slots.data<int32_t>(),
      .dst_slots = dst_slots.data<int32_t>(),
      .prefix_lens = prefix_lens.data<int32_t>(),
      .num_rows = num_rows.data<int32_t>(),
      .status = data_or_null<int32_t>(status),
      .batch = B,
      .num_slots = pools.slots,
  };
  SD_DISPATCH(check, stream, copy_kv, params);
}

void copy_kv_cpu(const CopyKvParams& p) {
  const RowDivmod page_size{static_cast<int>(p.rows.page_size)};
  for (int64_t b = 0; b < p.batch; ++b) {
    const RowsToCopy rows = rows_to_copy(p, b);
    if (rows.bits) set_status(p.status, rows.dst, rows.bits);
    for (int64_t j = 0; j < rows.count; ++j) {
      const RowCopy copy = find_copy(p, page_size, rows, j);
      if (copy.bits)
        set_status(p.status, rows.dst, copy.bits);
      else
        copy_row(p.pools, copy.from, copy.to);
    }
  }
}

}  // namespace specdec::kv
