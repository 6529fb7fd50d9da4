#include "kv/move_kv.h"

namespace specdec::kv {

void move_kv(CallStream stream, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table,
             const TensorView& path, const TensorView& num_valid, const TensorView& prefix_lens, const OptTensor& slots,
             const OptTensor& page_refs, const OptTensor& status) {
  Check check("move_kv");
  Dim B{"batch"}, S{"accept_width"};
  PagedLayers pools;
  pools.check(check, k_pools, v_pools, page_table);
  check.tensor("path", path, {B, S}, kInt32);
  check.tensor("num_valid", num_valid, {B}, kInt32);
  check.tensor("prefix_lens", prefix_lens, {pools.slots}, kInt32);
  check.slots(slots, B, pools.slots);
  check.tensor("page_refs", page_refs, {pools.pages}, kInt32);
  check.output("status", status, {pools.slots}, kInt32);
  if (B == 0 || pools.layers == 0) return;

  const MoveKvParams params{
      .pools = layer_pools(k_pools, v_pools),
      .rows = pools.rows(page_table, page_refs),
      .path = path.data<int32_t>(),
      .num_valid = num_valid.data<int32_t>(),
      .prefix_lens = prefix_lens.data<int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .batch = B,
      .accept_width = S,
      .num_slots = pools.slots,
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

}  // namespace specdec::kv
