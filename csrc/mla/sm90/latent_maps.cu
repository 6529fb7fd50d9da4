// Encode the TMA descriptors of a pool of latent rows on the host.
#include <algorithm>

#include "core/tensor_map.h"
#include "mla/sm90/latent_tile.cuh"

namespace specdec::mla {
namespace {

// Encode boxes of `panels` panels; return false if TMA cannot describe the strides.
//
// A box is written as wgmma reads it: 16 tokens in two groups of eight; of a group one panel after another; of a panel
// 64 elements of each token, swizzled. So a pool has five dimensions: the elements of a panel, the tokens of a group,
// the panels of a row, the groups of a page, and the pages.
bool encode(CUtensorMap& map, int panels, const MlaTreeAttentionParams& p) {
  const auto encode_tiled = tensor_map_encoder("mla_tree_attention");
  if (encode_tiled == nullptr) return false;
  const int64_t group = LatentTile::kGroupTokens, row = p.row_stride, page = p.page_stride;
  if (row <= 0 || (p.rows.num_pages > 1 && page <= 0)) return false;
  const cuuint64_t sizes[5] = {64, static_cast<cuuint64_t>(group), LatentTile::kWidth / 64,
                               static_cast<cuuint64_t>(p.rows.page_size / group),
                               static_cast<cuuint64_t>(p.rows.num_pages)};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(row), 128, static_cast<cuuint64_t>(group * row),
                                 static_cast<cuuint64_t>(p.rows.num_pages > 1 ? page : p.rows.page_size * row)};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(group), static_cast<cuuint32_t>(panels),
                             static_cast<cuuint32_t>(kBoxTokens / group), 1};
  const cuuint32_t each[5] = {1, 1, 1, 1, 1};
  return encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<char*>(p.kv_pool), sizes, strides, box, each,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

LatentMaps encode_latent_maps(const MlaTreeAttentionParams& p) {
  LatentMaps maps{};
  maps.usable = p.rows.page_size % kBoxTokens == 0 && p.rows.num_pages > 0 && encode(maps.wide, 4, p) &&
                encode(maps.narrow, 1, p);
  return maps;
}

}  // namespace specdec::mla
