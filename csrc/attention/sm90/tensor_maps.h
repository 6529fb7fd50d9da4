// TMA descriptors of the KV pools. TMA copies 16 tokens of a head per instruction, where a warp would copy two; it
// applies where 16 tokens lie in one page.
#pragma once

#include <cuda.h>

#include "attention/plan.h"
#include "attention/tree_attention.h"

namespace specdec::attention {

struct TensorMaps {
  CUtensorMap k, v;
  bool usable;
};

// Encode both pools. Set usable = false if pages are not a multiple of kTmaBoxTokens rows, or if TMA cannot describe
// the strides.
TensorMaps encode_tensor_maps(const TreeAttentionParams& p);

}  // namespace specdec::attention
