#include "kv/alloc_pages.h"

#include <limits>

namespace specdec::kv {

void alloc_pages(CallStream stream, const PoolTensors& tensors, const TensorView& seq_lens, int64_t reserve,
                 const OptTensor& slots, const OptTensor& status) {
  Check check("alloc_pages");
  Dim B{"batch"}, R{"num_slots"};
  const PagePool pool = check_pool(check, tensors, R);
  check.tensor("seq_lens", seq_lens, {R}, kInt32);
  check.range("reserve", reserve, 0, std::numeric_limits<int32_t>::max());
  if (!slots) B.value = R;
  check.slots(slots, B, R);
  check.output("status", status, {R}, kInt32);
  if (B == 0) return;

  const AllocPagesParams params{
      .pool = pool,
      .seq_lens = seq_lens.data<int32_t>(),
      .reserve = reserve,
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .batch = B,
  };
  SD_DISPATCH(check, stream, alloc_pages, params);
}

void alloc_pages_cpu(const AllocPagesParams& p) {
  int64_t height = free_height(p.pool);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_of(p.slots, b, p.pool.num_slots);
    if (slot < 0) continue;
    const int64_t held = pages_held(p.pool, p.pool.page_counts[slot]);
    const int64_t num_needed = pages_to_add(p, held, p.seq_lens[slot]);
    if (num_needed < 0) {
      set_status(p.status, slot, kBadLength);
    } else if (num_needed > height) {
      set_status(p.status, slot, kStalled);
    } else {
      for (int64_t i = 0; i < num_needed; ++i)
        put_page(p.pool, p.status, p.pool.free_stack[height - 1 - i], slot, held + i);
      p.pool.page_counts[slot] = static_cast<int32_t>(held + num_needed);
      height -= num_needed;
      clear_status(p.status, slot, kStalled);
    }
  }
  *p.pool.num_free = static_cast<int32_t>(height);
}

}  // namespace specdec::kv
