#include "kv/fork_pages.h"

namespace specdec::kv {

void fork_pages(CallStream stream, const PoolTensors& tensors, const TensorView& src_slots, const TensorView& dst_slots,
                const TensorView& prefix_lens, const OptTensor& status, const TensorView& out_num_rows) {
  Check check("fork_pages");
  Dim B{"batch"}, R{"num_slots"};
  const PagePool pool = check_pool(check, tensors, R);
  check.tensor("src_slots", src_slots, {B}, kInt32);
  check.range("batch", B, 0, kMaxForks);
  check.tensor("dst_slots", dst_slots, {B}, kInt32);
  check.tensor("prefix_lens", prefix_lens, {R}, kInt32);
  check.output("status", status, {R}, kInt32);
  check.output("out", out_num_rows, {B}, kInt32);
  if (B == 0) return;

  const ForkPagesParams params{
      .pool = pool,
      .src_slots = src_slots.data<int32_t>(),
      .dst_slots = dst_slots.data<int32_t>(),
      .prefix_lens = prefix_lens.data<int32_t>(),
      .status = data_or_null<int32_t>(status),
      .out_num_rows = out_num_rows.data<int32_t>(),
      .batch = B,
  };
  SD_DISPATCH(check, stream, fork_pages, params);
}

namespace {

// Return whether an earlier row of the call forks into this slot.
bool is_duplicate(const ForkPagesParams& p, int64_t b, int64_t dst) {
  for (int64_t earlier = 0; earlier < b; ++earlier)
    if (p.dst_slots[earlier] == dst && slot_of(p.src_slots, earlier, p.pool.num_slots) >= 0) return true;
  return false;
}

}  // namespace

void fork_pages_cpu(const ForkPagesParams& p) {
  constexpr int32_t kRejected = -1;  // in out_num_rows, until the end
  const int64_t height = free_height(p.pool);

  int64_t num_popped = 0;  // pages from the stack
  for (int64_t b = 0; b < p.batch; ++b) {
    const Fork fork = find_fork(p, b);
    p.out_num_rows[b] = kRejected;
    if (fork.dst < 0 || is_duplicate(p, b, fork.dst)) continue;
    if (fork.bits) {
      set_status(p.status, fork.dst, fork.bits);
    } else if (fork.num_rows > 0 && num_popped == height) {
      set_status(p.status, fork.dst, kStalled);
    } else {
      clear_status(p.status, fork.dst, kStalled);
      p.out_num_rows[b] = fork.num_rows;
      num_popped += fork.num_rows > 0;
    }
  }

  // Slots are changed only now, because a slot that another row forks into was empty before and is no source.
  int64_t height_left = height;
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.out_num_rows[b] == kRejected) continue;
    const int64_t src = p.src_slots[b], dst = p.dst_slots[b], pages = p.prefix_lens[dst] / p.pool.page_size;
    const int64_t first = first_held(p.pool.page_starts[src], pages);
    for (int64_t i = first; i < pages; ++i) share_page(p, p.pool.page_table[src * p.pool.max_pages + i], dst, i);
    p.pool.page_starts[dst] = static_cast<int32_t>(first);
    p.pool.page_counts[dst] = static_cast<int32_t>(pages + (p.out_num_rows[b] > 0));
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.out_num_rows[b] == kRejected)
      p.out_num_rows[b] = 0;
    else if (p.out_num_rows[b] > 0)
      put_page(p.pool, p.status, p.pool.free_stack[--height_left], p.dst_slots[b],
               p.prefix_lens[p.dst_slots[b]] / p.pool.page_size);
  }
  *p.pool.num_free = static_cast<int32_t>(height_left);
}

}  // namespace specdec::kv
