// The wgmma kernels for latent rows of 8 bits: FP8 with one factor, and the published 656 bytes.
#include "mla/sm90/wgmma.cuh"

namespace specdec::mla {

template void launch_wgmma<BFloat16, Float8>(const MlaTreeAttentionParams& p, Stream stream);
template void launch_wgmma<Half, Float8>(const MlaTreeAttentionParams& p, Stream stream);
template void launch_wgmma<BFloat16, Row656>(const MlaTreeAttentionParams& p, Stream stream);

}  // namespace specdec::mla
