// TMA descriptors of a pool of latent rows. One instruction copies a part of 16 tokens that lie on one page.
#pragma once

#include <cuda.h>

#include "mla/mla_tree_attention.h"

namespace specdec::mla {

constexpr int kBoxTokens = 16;  // KV rows of one page in a TMA box

struct LatentMaps {
  CUtensorMap wide, narrow;  // boxes of four panels, and of one: 64 elements of each token per panel
  bool usable;
};

// Encode both maps for rows of 512 + 64 elements. Set usable = false if pages are not a multiple of kBoxTokens rows, or
// if TMA cannot describe the strides.
LatentMaps encode_latent_maps(const MlaTreeAttentionParams& p);

}  // namespace specdec::mla
