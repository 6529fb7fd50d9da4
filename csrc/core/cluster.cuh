// Cluster: the thread-block cluster that works on one request on Hopper and later; a single block elsewhere.
#pragma once

#include <cooperative_groups.h>

#include "core/cuda.cuh"

namespace specdec {

constexpr int kRowThreads = 512;     // threads of a block that works on a row of logits, alone or in a cluster
constexpr unsigned kMaxCluster = 8;  // the largest size that every device with clusters supports

struct Cluster {
#if __CUDA_ARCH__ >= 900
  __device__ static unsigned size() { return cooperative_groups::this_cluster().num_blocks(); }
  __device__ static unsigned rank() { return cooperative_groups::this_cluster().block_rank(); }
  __device__ static int size_log2() { return __popc(size() - 1); }  // sizes are powers of two
  // Map an address in this block's shared memory to the same place in the block of that rank (distributed smem).
  template <class T>
  __device__ static T* at(T* shared, unsigned rank) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
  // Return the same as a shared::cluster address, for instructions that take one.
  __device__ static uint32_t address_at(const void* shared, unsigned rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
    return there;
  }
  // A barrier over all threads of the cluster, after which every thread sees all shared memory; and its two halves.
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  __device__ static void arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ static void wait() { cooperative_groups::this_cluster().barrier_wait(); }
  // Arrive without release semantics: enough if this block has written nothing for other blocks but mbarriers, which
  // Mbarrier::init() wrote and fence_barrier_init() published.
  __device__ static void arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
  __device__ static void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
#else
  __device__ static unsigned size() { return 1; }
  __device__ static int size_log2() { return 0; }
  __device__ static unsigned rank() { return 0; }
  template <class T>
  __device__ static T* at(T* shared, unsigned) {
    return shared;
  }
  __device__ static uint32_t address_at(const void* shared, unsigned) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
  __device__ static void sync() { __syncthreads(); }
  // Never called where a cluster is one block.
  __device__ static void arrive() {}
  __device__ static void arrive_relaxed() {}
  __device__ static void fence_barrier_init() {}
  __device__ static void wait() {}
#endif
};

// Return the cluster size for each of `tasks` that fills the device with `blocks_per_sm` blocks per SM: a power of two,
// at most kMaxCluster and at most `useful`.
unsigned cluster_size(const char* op, int64_t tasks, int blocks_per_sm, int64_t useful);

}  // namespace specdec
