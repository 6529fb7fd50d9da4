#include "kv/pages.h"

#include <limits>

namespace specdec::kv {

PagePool check_pool(Check& check, const PoolTensors& pool, Dim& num_slots) {
  Dim M{"max_pages"}, P{"num_pages"};
  check.output("page_table", pool.page_table, {num_slots, M}, kInt32);
  check.range("num_slots * max_pages", num_slots * M, 0, std::numeric_limits<int32_t>::max());
  check.output("page_counts", pool.page_counts, {num_slots}, kInt32);
  check.output("page_starts", pool.page_starts, {num_slots}, kInt32);
  check.output("page_refs", pool.page_refs, {P}, kInt32);
  check.output("free_stack", pool.free_stack, {P}, kInt32);
  check.output("num_free", pool.num_free, {1}, kInt32);
  check.range("page_size", pool.page_size, 1, std::numeric_limits<int32_t>::max());
  return {
      .page_table = pool.page_table.data<int32_t>(),
      .page_counts = pool.page_counts.data<int32_t>(),
      .page_starts = pool.page_starts.data<int32_t>(),
      .page_refs = pool.page_refs.data<int32_t>(),
      .free_stack = pool.free_stack.data<int32_t>(),
      .num_free = pool.num_free.data<int32_t>(),
      .num_slots = num_slots,
      .max_pages = M,
      .num_pages = P,
      .page_size = pool.page_size,
  };
}

}  // namespace specdec::kv
