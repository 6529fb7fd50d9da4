// Dispatch a planned tree_attention call to its kernel.
#include "attention/common/launch.cuh"
#include "core/cluster.cuh"

namespace specdec::attention {
static_assert(kMaxClusterBlocks == kMaxCluster);

void tree_attention_cuda(const PlannedAttention& p, Stream stream) {
  if (p.plan.kernel == Kernel::kPlain) return plain_attention(p, stream);
  const DevicePlan plan = make_device_plan(p.plan, p);
  with_head_dim(p.head_dim, [&]<int D>() {
    switch (p.plan.kernel) {
      case Kernel::kMma:
        return mma_attention<D>(p, plan, stream);
      case Kernel::kWgmma:
        return wgmma_attention<D>(p, plan, stream);
      case Kernel::kDequantRegisters:
        return dequant_registers_attention<D>(p, plan, stream);
      case Kernel::kDequantSmem:
        return dequant_smem_attention<D>(p, plan, stream);
      case Kernel::kCluster:
        return cluster_attention<D>(p, plan, stream);
      case Kernel::kPlain:
        break;
    }
  });
}

}  // namespace specdec::attention
