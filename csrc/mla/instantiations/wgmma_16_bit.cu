// The wgmma kernels for latent rows of the queries' type.
#include "mla/sm90/wgmma.cuh"

namespace specdec::mla {

template void launch_wgmma<BFloat16, BFloat16>(const MlaTreeAttentionParams& p, Stream stream);
template void launch_wgmma<Half, Half>(const MlaTreeAttentionParams& p, Stream stream);

}  // namespace specdec::mla
