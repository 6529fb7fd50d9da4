#include "kv/move_kv.h"

#include <cstring>
#include <limits>

#include "kv/bytes.h"

namespace specdec {

void move_kv(CallStream stream, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table,
             const TensorView& path, const TensorView& num_valid, const TensorView& seq_lens_before,
             const OptTensor& slots, const OptTensor& page_refs, const OptTensor& status) {
  Check check("move_kv");
  Dim B{"batch"}, S{"accept_width"}, N{"layers"}, H{"heads"}, D{"head_dim"};
  Dim P{"num_pages"}, Z{"page_size"}, R{"num_slots"}, M{"max_pages"};
  check.strided_output("k_pools", k_pools, {N, P, Z, H, D}, kFloats);
  check.range("layers", N, 0, kMaxGridY);
  check.range("page_size", Z, 1, std::numeric_limits<int32_t>::max());
  check.range("heads * head_dim", H * D, 1, kMaxRowItems);
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
      .k_pools = pool_view(k_pools, 1),
      .v_pools = pool_view(v_pools, 1),
      .k_layer_stride = byte_stride(k_pools, 0),
      .v_layer_stride = byte_stride(v_pools, 0),
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
      .layers = N,
      .heads = H,
      .head_bytes = D * item_bytes(k_pools),
      .unit = copy_unit({&k_pools, &v_pools}),
  };
  SD_DISPATCH(check, stream, move_kv, params);
}

void move_kv_cpu(const MoveKvParams& p) {
  const RowDivmod page_size{static_cast<int>(p.rows.page_size)};
  for (int64_t b = 0; b < p.batch; ++b) {
    RowMoves<RowDivmod> moves(p, page_size, b);
    while (moves.next()) {
      for (int64_t layer = 0; layer < p.layers; ++layer) {
        for (int64_t h = 0; h < p.heads; ++h) {
          const int64_t k = layer * p.k_layer_stride + h * p.k_pools.head_stride;
          const int64_t v = layer * p.v_layer_stride + h * p.v_pools.head_stride;
          std::memmove(row_data(p.k_pools, moves.to) + k, row_data(p.k_pools, moves.from) + k, p.head_bytes);
          std::memmove(row_data(p.v_pools, moves.to) + v, row_data(p.v_pools, moves.from) + v, p.head_bytes);
        }
      }
    }
    if (moves.bits) set_status(p.status, moves.slot, moves.bits);
  }
}

}  // namespace specdec
