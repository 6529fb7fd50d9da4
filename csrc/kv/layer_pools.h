// LayerPools: the K and V pools of all layers, with the same page layout in each.
#pragma once

#include <cstring>

#include "core/check.h"
#include "kv/pool_view.h"

namespace specdec::kv {

struct LayerPools {
  PoolView k, v;  // of layer 0; layers are these strides apart, in bytes:
  int64_t k_layer_stride, v_layer_stride;
  int64_t layers, heads;
  int64_t head_bytes, unit;  // bytes per head, and per copy
};

// Maximum elements of a row in all layers together: kernels count columns in 32 bits, with a margin.
constexpr int64_t kMaxLayerItems = int64_t{1} << 29;

// Return the pools of tensors [layers, num_pages, page_size, heads, head_dim].
inline LayerPools layer_pools(const TensorView& k, const TensorView& v) {
  return {.k = pool_view(k, 1),
          .v = pool_view(v, 1),
          .k_layer_stride = byte_stride(k, 0),
          .v_layer_stride = byte_stride(v, 0),
          .layers = k.shape(0),
          .heads = k.shape(3),
          .head_bytes = k.shape(4) * item_bytes(k),
          .unit = copy_unit({&k, &v})};
}

// The sizes of such pools and their page table, which other arguments share.
struct PagedLayers {
  Dim layers{"layers"}, heads{"heads"}, head_dim{"head_dim"};
  Dim pages{"num_pages"}, page_size{"page_size"}, slots{"num_slots"}, max_pages{"max_pages"};

  // Check both pools and the table, in this order, and bind their sizes.
  void check(Check& check, const TensorView& k_pools, const TensorView& v_pools, const TensorView& page_table);

  PageRows rows(const TensorView& page_table, const OptTensor& page_refs) const {
    return {.page_table = page_table.data<int32_t>(),
            .page_refs = data_or_null<const int32_t>(page_refs),
            .max_pages = max_pages,
            .num_pages = pages,
            .page_size = page_size};
  }
};

// Copy one row in every layer, on the host.
inline void copy_row(const LayerPools& pools, KvRow from, KvRow to) {
  for (int64_t layer = 0; layer < pools.layers; ++layer) {
    for (int64_t h = 0; h < pools.heads; ++h) {
      const int64_t k = layer * pools.k_layer_stride + h * pools.k.head_stride;
      const int64_t v = layer * pools.v_layer_stride + h * pools.v.head_stride;
      std::memmove(row_data(pools.k, to) + k, row_data(pools.k, from) + k, pools.head_bytes);
      std::memmove(row_data(pools.v, to) + v, row_data(pools.v, from) + v, pools.head_bytes);
    }
  }
}

}  // namespace specdec::kv
