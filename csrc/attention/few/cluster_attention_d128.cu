#include "attention/few/cluster_attention.cuh"

namespace specdec::few {

template void cluster_attention_of<128>(const TreeAttentionParams& p, const Cut& cut, Stream stream);

}  // namespace specdec::few
