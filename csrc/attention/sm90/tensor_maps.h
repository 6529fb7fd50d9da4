// The pools as Hopper's copy engine sees them (tensor maps). It copies 16 tokens of a head at once where a warp would
// copy two, wherever 16 tokens lie in one page.
#pragma once

#include <cuda.h>

#include "attention/plan.h"
#include "attention/tree_attention.h"

namespace specdec::attention {

struct TensorMaps {
  CUtensorMap k, v;
  bool usable;
};

// Sets usable = false where pages are not made of whole boxes, or the driver has no map of such strides.
TensorMaps tensor_maps_of(const TreeAttentionParams& p);

}  // namespace specdec::attention
