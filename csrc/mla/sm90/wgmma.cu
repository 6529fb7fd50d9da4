// The kernel for compute capability 9.0, for bfloat16 and float16.
#include "attention/common/launch.cuh"
#include "mla/kernels.h"
#include "mla/sm90/wgmma.cuh"

namespace specdec::mla {

void wgmma_attention(const MlaTreeAttentionParams& p, Stream stream) {
  const attention::AttentionPlan plan{.tile_rows = p.plan.tile_rows,
                                      .tile_tokens = p.plan.tile_tokens,
                                      .row_tiles = p.plan.row_tiles,
                                      .blocks_per_sm = 1,
                                      .whole_items = p.plan.whole_items,
                                      .workers = p.plan.workers};
  attention::with_16_bit_type(
      p.dtype, [&]<class T>() { launch_wgmma<WgmmaAttention<T>>(p, attention::make_device_plan(plan, p), stream); });
}

}  // namespace specdec::mla
