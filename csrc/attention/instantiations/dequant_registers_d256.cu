// Instantiate dequant_registers_attention for head_dim 256.
#include "attention/sm90/dequant_registers.cuh"

namespace specdec::attention {

template void dequant_registers_attention<256>(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);

}  // namespace specdec::attention
