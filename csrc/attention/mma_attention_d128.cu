#include "attention/mma_attention.cuh"

namespace specdec {

template void mma_attention_of<128>(const TreeAttentionParams& p, const Cut& cut, Stream stream);

}  // namespace specdec
