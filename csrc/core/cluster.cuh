// The blocks that work on one request: a thread-block cluster on Hopper and later, one block by itself elsewhere.
#pragma once

#include <cooperative_groups.h>

#include "core/cuda.cuh"

namespace specdec {

constexpr int kRowThreads = 512;     // of a block that works on a row of logits, alone or with others
constexpr unsigned kMaxCluster = 8;  // the largest that every device with clusters has

struct Cluster {
#if __CUDA_ARCH__ >= 900
  __device__ static unsigned size() { return cooperative_groups::this_cluster().num_blocks(); }
  __device__ static unsigned rank() { return cooperative_groups::this_cluster().block_rank(); }
  __device__ static int size_log2() { return __popc(size() - 1); }  // sizes are powers of two
  // Where `shared` of this block lies in the block of that rank.
  template <class T>
  __device__ static T* at(T* shared, unsigned rank) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
  // The same as an address of the cluster's shared memory, for instructions that take one.
  __device__ static uint32_t address_at(const void* shared, unsigned rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
    return there;
  }
  // A barrier of all threads of all blocks, after which each sees the shared memory of all; and its two halves.
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  __device__ static void arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ static void wait() { cooperative_groups::this_cluster().barrier_wait(); }
  // Arrives at a barrier before which this block has written nothing for others but barriers made by init().
  __device__ static void arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
  __device__ static void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
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
  // Not called by a block by itself.
  __device__ static void arrive() {}
  __device__ static void arrive_relaxed() {}
  __device__ static void show_barriers() {}
  __device__ static void wait() {}
#endif
};

// Blocks to put on each of `tasks` so that they fill the device, `blocks_per_sm` at a time: a power of two, at most
// kMaxCluster and at most `useful`.
unsigned cluster_size(const char* op, int64_t tasks, int blocks_per_sm, int64_t useful);

}  // namespace specdec
