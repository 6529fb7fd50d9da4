// The kernels of mla_tree_attention, one launch function each.
#pragma once

#include "mla/mla_tree_attention.h"

namespace specdec::mla {

void plain_attention(const MlaTreeAttentionParams& p, Stream stream);

}  // namespace specdec::mla
