#include "kv/pages.h"

#include <limits>

namespace specdec {

PagePool check_pool(Check& check, const TensorView& page_table, const TensorView& page_counts,
                    const TensorView& page_refs, const TensorView& free_stack, const TensorView& num_free,
                    int64_t page_size, Dim& num_slots) {
  Dim M{"max_pages"}, P{"num_pages"};
  check.output("page_table", page_table, {num_slots, M}, kInt32);
  check.range("num_slots * max_pages", num_slots * M, 0, std::numeric_limits<int32_t>::max());
  check.output("page_counts", page_counts, {num_slots}, kInt32);
  check.output("page_refs", page_refs, {P}, kInt32);
  check.output("free_stack", free_stack, {P}, kInt32);
  check.output("num_free", num_free, {1}, kInt32);
  check.range("page_size", page_size, 1, std::numeric_limits<int32_t>::max());
  return {
      .page_table = page_table.data<int32_t>(),
      .page_counts = page_counts.data<int32_t>(),
      .page_refs = page_refs.data<int32_t>(),
      .free_stack = free_stack.data<int32_t>(),
      .num_free = num_free.data<int32_t>(),
      .num_slots = num_slots,
      .max_pages = M,
      .num_pages = P,
      .page_size = page_size,
  };
}

}  // namespace specdec
