// The kernels of mla_tree_attention, one launch function each.
#pragma once

#include "mla/mla_tree_attention.h"

namespace specdec::mla {

void plain_attention(const MlaTreeAttentionParams& p, Stream stream);
void wgmma_attention(const MlaTreeAttentionParams& p, Stream stream);

// Launch the mma.sync kernel of p.plan's tile. Defined by instantiations/, for T of 16 bits.
template <class T, class Row>
void launch_mma_tile(const MlaTreeAttentionParams& p, Stream stream);

}  // namespace specdec::mla
