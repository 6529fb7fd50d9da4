#include "kv/copy_kv.h"

#include <limits>

namespace specdec {

void copy_kv(CallStream stream, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table,
             const TensorView& src_slots, const TensorView& dst_slots, const TensorView& lens,
             const TensorView& num_rows, const OptTensor& page_refs, const OptTensor& status) {
  Check check("copy_kv");
  Dim B{"batch"}, N{"layers"}, H{"heads"}, D{"head_dim"};
  Dim P{"num_pages"}, Z{"page_size"}, R{"num_slots"}, M{"max_pages"};
  check.strided_output("k_pools", k_pools, {N, P, Z, H, D}, kFloats);
  check.range("page_size", Z, 1, std::numeric_limits<int32_t>::max());
  check.range("heads * head_dim", H * D, 1, kMaxRowItems);
  check.range("layers * heads * head_dim", N * H * D, 0, kMaxLayerItems);
  check.strided_output("v_pools", v_pools, {N, P, Z, H, D}, dtype_of(k_pools));
  check.tensor("page_table", page_table, {R, M}, kInt32);
  check.tensor("src_slots", src_slots, {B}, kInt32);
  check.tensor("dst_slots", dst_slots, {B}, kInt32);
  check.tensor("lens", lens, {R}, kInt32);
  check.tensor("num_rows", num_rows, {B}, kInt32);
  check.tensor("page_refs", page_refs, {P}, kInt32);
  check.output("status", status, {R}, kInt32);
  if (B == 0 || N == 0) return;

  const CopyKvParams params{
      .pools = layer_pools(k_pools, v_pools),
      .rows = {.page_table = page_table.data<int32_t>(),
               .page_refs = data_or_null<const int32_t>(page_refs),
               .max_pages = M,
               .num_pages = P,
               .page_size = Z},
      .src_slots = src_slots.data<int32_t>(),
      .dst_slots = dst_slots.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .num_rows = num_rows.data<int32_t>(),
      .status = data_or_null<int32_t>(status),
      .batch = B,
      .num_slots = R,
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

}  // namespace specdec
