#include "kv/layer_pools.h"

#include <limits>

#include "kv/pool_view.h"

namespace specdec::kv {

void PagedLayers::check(Check& check, const TensorView& k_pools, const TensorView& v_pools,
                        const TensorView& page_table) {
  check.strided_output("k_pools", k_pools, {layers, pages, page_size, heads, head_dim}, kKvDtypes);
  check.range("page_size", page_size, 1, std::numeric_limits<int32_t>::max());
  check.range("heads * head_dim", heads * head_dim, 1, kMaxRowItems);
  check.range("layers * heads * head_dim", layers * heads * head_dim, 0, kMaxLayerItems);
  check.strided_output("v_pools", v_pools, {layers, pages, page_size, heads, head_dim}, dtype_of(k_pools));
  check.tensor("page_table", page_table, {slots, max_pages}, kInt32);
}

}  // namespace specdec::kv
