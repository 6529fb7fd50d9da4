// The pools as the copy engine of Hopper sees them (tensor maps), which copies 16 rows of a head where a warp would
// copy two: wherever as many tokens lie in one page.
#pragma once

#include <cuda.h>

#include "attention/tree_attention.h"

namespace specdec {

constexpr int kMapRows = 16;  // of a copy; 128 bytes of each

struct PoolMaps {
  CUtensorMap k, v;
  bool usable;
};

// Not usable where pages are not made of whole copies, or the driver has no map of such strides.
PoolMaps pool_maps_of(const TreeAttentionParams& p);

}  // namespace specdec
