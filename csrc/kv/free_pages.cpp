#include "kv/free_pages.h"

#include <limits>

namespace specdec::kv {

void free_pages(CallStream stream, const PoolTensors& tensors, const TensorView& prefix_lens,
                std::optional<int64_t> window, const OptTensor& slots, const OptTensor& status) {
  Check check("free_pages");
  Dim B{"batch"}, R{"num_slots"};
  const PagePool pool = check_pool(check, tensors, R);
  check.tensor("prefix_lens", prefix_lens, {R}, kInt32);
  if (window) check.range("window", *window, 1, std::numeric_limits<int32_t>::max());
  if (!slots) B.value = R;
  check.slots(slots, B, R);
  check.output("status", status, {R}, kInt32);
  if (B == 0) return;

  const FreePagesParams params{
      .pool = pool,
      .prefix_lens = prefix_lens.data<int32_t>(),
      .window = window.value_or(-1),
      .slots = data_or_null<const int32_t>(slots),
      .status = data_or_null<int32_t>(status),
      .batch = B,
  };
  SD_DISPATCH(check, stream, free_pages, params);
}

void free_pages_cpu(const FreePagesParams& p) {
  const PagePool& pool = p.pool;
  int64_t height = free_height(pool);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t slot = slot_of(p.slots, b, pool.num_slots);
    if (slot < 0) continue;
    const PagesToFree to_free = pages_to_free(p, pool.page_starts[slot], pool.page_counts[slot], p.prefix_lens[slot]);
    if (!to_free.valid) {
      set_status(p.status, slot, kBadLength);
      continue;
    }
    for (int64_t i = to_free.end - 1; i >= to_free.first; --i) height = return_page(p, slot, i, height);
    pool.page_starts[slot] = static_cast<int32_t>(to_free.start);
    pool.page_counts[slot] = static_cast<int32_t>(to_free.count);
  }
  *pool.num_free = static_cast<int32_t>(height);
}

}  // namespace specdec::kv
