// Dispatch a planned mla_tree_attention call to its kernel.
#include "mla/kernels.h"

namespace specdec::mla {

void mla_tree_attention_cuda(const MlaTreeAttentionParams& p, Stream stream) {
  if (p.plan.kernel == Kernel::kPlain) return plain_attention(p, stream);
  if (p.plan.kernel == Kernel::kWgmma) return wgmma_attention(p, stream);
  if (p.format == RowFormat::k656Bytes) return launch_mma_tile<BFloat16, Row656>(p, stream);
  const bool fp8 = p.format == RowFormat::kFloat8;
  if (p.dtype == kBFloat16)
    return fp8 ? launch_mma_tile<BFloat16, Float8>(p, stream) : launch_mma_tile<BFloat16, BFloat16>(p, stream);
  return fp8 ? launch_mma_tile<Half, Float8>(p, stream) : launch_mma_tile<Half, Half>(p, stream);
}

}  // namespace specdec::mla
