// Instantiate mma_attention for head_dim 256.
#include "attention/sm80/mma.cuh"

namespace specdec::attention {

template void mma_attention<256>(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);

}  // namespace specdec::attention
