// What the kernels of linear_rows on Hopper have in common: a ring of stages in shared memory, each a few slices of the
// weight and of x. Threads that copy (TMA) fill them in turn, and warpgroups that multiply read them.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "core/cluster.cuh"
#include "core/mbarrier.cuh"
#include "core/turn.cuh"

namespace specdec {

constexpr int kSlice = 64;  // numbers of a row that lie together: 128 bytes, a row of a swizzled panel
constexpr int kWarpgroup = 4 * kWarp;
constexpr int kRingBytes = 226 * 1024;

// Of each stage: when all of it has come, and when all who read it have.
template <int kStages>
struct RingBarriers {
  Mbarrier full[kStages], empty[kStages];
};

// What a kernel begins with; the barriers are there for others after the next barrier of the block, or of its cluster.
// The next kernel is let in at once, and may wait for this one with its ring full of its weight.
template <int kStages>
__device__ __forceinline__ void begin_ring(const CUtensorMap& weight, const CUtensorMap& x,
                                           RingBarriers<kStages>& barriers, int stages, unsigned readers) {
  let_next_kernel_start();
  if (threadIdx.x > 0) return;
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&weight));
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&x));
  for (int i = 0; i < stages; ++i) {
    barriers.full[i].init(1);
    barriers.empty[i].init(readers);
  }
  Cluster::show_barriers();
}

}  // namespace specdec
