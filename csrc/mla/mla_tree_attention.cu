// Dispatch a planned mla_tree_attention call to its kernel.
#include "mla/kernels.h"

namespace specdec::mla {
namespace {

template <class T, class Row>
void launch_tensor_cores(const MlaTreeAttentionParams& p, Stream stream) {
  if (p.plan.kernel == Kernel::kWgmma) return launch_wgmma<T, Row>(p, stream);
  launch_mma_tile<T, Row>(p, stream);
}

}  // namespace

void mla_tree_attention_cuda(const MlaTreeAttentionParams& p, Stream stream) {
  if (p.plan.kernel == Kernel::kPlain) return plain_attention(p, stream);
  if (p.format == RowFormat::k656Bytes) return launch_tensor_cores<BFloat16, Row656>(p, stream);
  const bool fp8 = p.format == RowFormat::kFloat8;
  if (p.dtype == kBFloat16)
    return fp8 ? launch_tensor_cores<BFloat16, Float8>(p, stream) : launch_tensor_cores<BFloat16, BFloat16>(p, stream);
  return fp8 ? launch_tensor_cores<Half, Float8>(p, stream) : launch_tensor_cores<Half, Half>(p, stream);
}

}  // namespace specdec::mla
