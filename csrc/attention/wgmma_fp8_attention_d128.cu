#include "attention/wgmma_fp8_attention.cuh"

namespace specdec {

template void wgmma_fp8_attention_of<128>(const TreeAttentionParams& p, const Cut& cut, Stream stream);

}  // namespace specdec
