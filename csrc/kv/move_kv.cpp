#include "kv/move_kv.h"

#include <limits>

namespace specdec {

void move_kv(CallStream stream, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table,
             const TensorView& path, const TensorView& num_valid, const TensorView& seq_lens_before,
             const OptTensor& slots, const OptTensor& page_refs, const OptTensor& status) {
  Check check("move_kv");
  Dim B{"batch"}, S{"accept_width"}, N{"layers"}, H{"heads"}, D{"head_dim"};
  Dim P{"num_pages"}, Z{"page_size"}, R{"num_slots"}, M{"max_pages"};
  check.strided_output("k_pools", k_pools, {N, P, Z, H, D}, kFloats);
  check.range("page_size", Z, 1, std::numeric_limits<int32_t>::max());
  check.range("heads * head_dim", H * D, 1, kMaxRowItems);
  check.range("layers * heads * head_dim", N * H * D, 0, kMaxLayerItems);
  check.strided_output("v_pools", v_pools, {N, P, Z, H, D}, dtype_of(k_pools));
  check.tensor("page_table", page_table, {R, M}, kInt32);
  check.tensor("path", path, {B, S}, kInt32);
  check.tensor("num_valid", num_valid, {B}, kInt32);
  check.tensor("seq_lens_before", seq_lens_before, {R}, kInt32);
  check.slots(slots, B, R);
  check.tensor("page_refs", page_refs, {P}, kInt32);
  check.output("status", status, {R}, kInt32);
  if (B == 0 || N == 0) return;

  const MoveKvParams params{
      .pools = layer_pools(k_pools, v_pools),
      .rows = {.page_table = page_table.data<int32_t>(),
               .page_refs = data_or_null<const int32_t>(page_refs),
               .max_pages = M,
               .num_pages = P,
               .page_size = Z},
      .path = path.data<int32_t>(),
      .num_valid = num_valid.data<int32_t>(),
      .seq_lens_before = seq_lens_before.data<int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .batch = B,
      .accept_width = S,
      .num_slots = R,
  };
  SD_DISPATCH(check, stream, move_kv, params);
}

void move_kv_cpu(const MoveKvParams& p) {
  const RowDivmod page_size{static_cast<int>(p.rows.page_size)};
  for (int64_t b = 0; b < p.batch; ++b) {
    const PathToMove request = path_to_move(p, b);
    int32_t bits = request.bits;
    for (int64_t j = 0; j < request.count && bits == 0; ++j) {
      const RowMove move = find_move(p, page_size, request, p.path + b * p.accept_width, j);
      if (move.needed) copy_row(p.pools, move.from, move.to);
      bits = move.bits;
    }
    if (bits) set_status(p.status, request.slot, bits);
  }
}

}  // namespace specdec
