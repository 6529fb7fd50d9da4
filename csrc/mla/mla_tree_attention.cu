// Dispatch a planned mla_tree_attention call to its kernel.
#include "mla/kernels.h"

namespace specdec::mla {

void mla_tree_attention_cuda(const MlaTreeAttentionParams& p, Stream stream) { plain_attention(p, stream); }

}  // namespace specdec::mla
