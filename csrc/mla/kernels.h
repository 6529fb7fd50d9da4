// The kernels of mla_tree_attention, one launch function each.
#pragma once

#include "mla/mla_tree_attention.h"

namespace specdec::mla {

void plain_attention(const MlaTreeAttentionParams& p, Stream stream);

// Launch the mma.sync kernel of p.plan's tile, or the wgmma kernel. Defined by instantiations/, for T of 16 bits.
template <class T, class Row>
void launch_mma_tile(const MlaTreeAttentionParams& p, Stream stream);
template <class T, class Row>
void launch_wgmma(const MlaTreeAttentionParams& p, Stream stream);

}  // namespace specdec::mla
