// Instantiate cluster_attention for head_dim 256.
#include "attention/sm90/cluster.cuh"

namespace specdec::attention {

template void cluster_attention<256>(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream);

}  // namespace specdec::attention
