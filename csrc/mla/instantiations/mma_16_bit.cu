// The mma.sync kernels for latent rows of the queries' type.
#include "mla/sm80/mma.cuh"

namespace specdec::mla {

template void launch_mma_tile<BFloat16, BFloat16>(const MlaTreeAttentionParams& p, Stream stream);
template void launch_mma_tile<Half, Half>(const MlaTreeAttentionParams& p, Stream stream);

}  // namespace specdec::mla
