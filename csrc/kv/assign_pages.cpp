#include "kv/assign_pages.h"

#include <algorithm>
#include <array>
#include <utility>

namespace specdec::kv {

void assign_pages(CallStream stream, const PoolTensors& tensors, const TensorView& src_entries,
                  const TensorView& dst_entries) {
  Check check("assign_pages");
  Dim B{"batch"}, R{"num_slots"};
  const PagePool pool = check_pool(check, tensors, R);
  check.tensor("src_entries", src_entries, {B}, kInt32);
  check.range("batch", B, 0, kMaxAssignments);
  check.tensor("dst_entries", dst_entries, {B}, kInt32);
  if (B == 0) return;

  const AssignPagesParams params{
      .pool = pool,
      .src_entries = src_entries.data<int32_t>(),
      .dst_entries = dst_entries.data<int32_t>(),
      .batch = B,
  };
  SD_DISPATCH(check, stream, assign_pages, params);
}

void assign_pages_cpu(const AssignPagesParams& p) {
  const PagePool& pool = p.pool;
  std::array<int32_t, kMaxAssignments> entries, pages;  // per row: destination entry and source page
  for (int64_t b = 0; b < p.batch; ++b) {
    const int32_t entry = entry_of(pool, p.dst_entries[b]);
    const auto* end = entries.begin() + b;
    entries[b] = std::find(entries.cbegin(), end, entry) == end ? entry : -1;
    pages[b] = entries[b] < 0 ? -1 : page_to_share(pool, p.src_entries[b]);
  }
  for (int64_t b = 0; b < p.batch; ++b)
    if (pages[b] >= 0) ++pool.page_refs[pages[b]];
  int64_t height = free_height(pool);
  for (int64_t b = 0; b < p.batch; ++b) {
    if (entries[b] < 0) continue;
    const int64_t freed = release_page(pool, std::exchange(pool.page_table[entries[b]], pages[b]), height);
    if (freed >= 0) height = freed;
  }
  *pool.num_free = static_cast<int32_t>(height);
}

}  // namespace specdec::kv
