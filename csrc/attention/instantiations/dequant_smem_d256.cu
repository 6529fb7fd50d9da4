// Instantiate dequant_smem_attention for head_dim 256.
#include "attention/sm90/wgmma.cuh"

namespace specdec::attention {

template void dequant_smem_attention<256>(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);

}  // namespace specdec::attention
