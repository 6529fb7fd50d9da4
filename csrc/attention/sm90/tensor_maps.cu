// Encode the TMA descriptors of the KV pools on the host.
#include <algorithm>

#include "attention/sm90/tensor_maps.h"
#include "core/tensor_map.h"

namespace specdec::attention {
namespace {

// Encode a pool; return false if TMA cannot describe its strides.
bool encode(CUtensorMap& map, const void* pool, const PoolStrides& strides, const TreeAttentionParams& p) {
  const auto encode_tiled = tensor_map_encoder("tree_attention");
  if (encode_tiled == nullptr) return false;
  const int64_t sizes[4] = {p.head_dim, p.kv_heads, p.rows.page_size, p.rows.num_pages};
  const int64_t steps[4] = {1, strides.head, strides.row, strides.page};
  const int64_t size = p.fp8 ? 1 : 2, line = std::min<int64_t>(p.head_dim * size, 128);  // in bytes
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(line / size), 1, kTmaBoxTokens, 1}, each[4] = {1, 1, 1, 1};
  cuuint64_t counts[4], bytes[4];
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] > 1 && steps[i] <= 0) return false;
    counts[i] = static_cast<cuuint64_t>(sizes[i]);
    // A dimension of size 1 may have any stride.
    bytes[i] = sizes[i] > 1 ? static_cast<cuuint64_t>(size * steps[i]) : 16;
  }
  return encode_tiled(&map, p.fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 4,
                      const_cast<void*>(pool), counts, bytes + 1, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      line == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                      p.fp8 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

TensorMaps encode_tensor_maps(const TreeAttentionParams& p) {
  TensorMaps maps{};
  maps.usable = has_tma_boxes(p.rows.page_size) && p.rows.num_pages > 0 && encode(maps.k, p.k_pool, p.k_strides, p) &&
                encode(maps.v, p.v_pool, p.v_strides, p);
  return maps;
}

}  // namespace specdec::attention
