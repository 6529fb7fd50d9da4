#include "attention/wgmma_attention.cuh"

namespace specdec {

template void wgmma_widened_attention_of<128>(const TreeAttentionParams& p, const Cut& cut, Stream stream);

}  // namespace specdec
