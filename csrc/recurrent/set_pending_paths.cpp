#include "recurrent/set_pending_paths.h"

#include <algorithm>

namespace specdec::recurrent {

void set_pending_paths(CallStream stream, const TensorView& nodes, const TensorView& num_nodes,
                       const TensorView& parity, const TensorView& path, const TensorView& num_valid,
                       const OptTensor& slots, const OptTensor& status) {
  Check check("set_pending_paths");
  Dim B{"batch"}, S{"accept_width"}, R{"num_slots"};
  check.output("paths.nodes", nodes, {R, S}, kInt32);
  check.output("paths.num_nodes", num_nodes, {R}, kInt32);
  check.output("paths.parity", parity, {R}, kInt32);
  check.tensor("path", path, {B, S}, kInt32);
  check.tensor("num_valid", num_valid, {B}, kInt32);
  check.slots(slots, B, R);
  check.output("status", status, {R}, kInt32);
  if (B == 0) return;

  const SetPendingPathsParams params{
      .nodes = nodes.data<int32_t>(),
      .num_nodes = num_nodes.data<int32_t>(),
      .parity = parity.data<int32_t>(),
      .path = path.data<int32_t>(),
      .num_valid = num_valid.data<int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .batch = B,
      .accept_width = S,
      .num_slots = R,
  };
  SD_DISPATCH(check, stream, set_pending_paths, params);
}

void set_pending_paths_cpu(const SetPendingPathsParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_to_set(p, b);
    if (slot < 0) continue;
    const int32_t* path = p.path + b * p.accept_width;
    const int64_t count = p.num_valid[b];
    int32_t bits = count < 0 || count > p.accept_width ? kBadLength : 0;
    for (int64_t j = 0; bits == 0 && j < count; ++j)
      if (breaks_path(path, j)) bits = kBadTree;
    if (bits == 0) std::copy_n(path, count, p.nodes + slot * p.accept_width);
    p.num_nodes[slot] = bits == 0 ? static_cast<int32_t>(count) : 0;
    p.parity[slot] = (p.parity[slot] & 1) ^ 1;
    if (bits) set_status(p.status, slot, bits);
  }
}

}  // namespace specdec::recurrent
