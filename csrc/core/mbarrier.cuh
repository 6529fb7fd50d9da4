// Mbarrier: a barrier in shared memory (mbarrier, compute capability 8.0) that synchronizes producer and consumer warps
// and counts the bytes of TMA copies.
#pragma once

#include <cstdint>

namespace specdec {

struct Mbarrier {
  uint64_t state;

  __device__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  // Arrive with release semantics: waiters see what this thread did before.
  __device__ void arrive() {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address()) : "memory");
  }
  // Arrive and expect `bytes` of copies: the phase also waits for them (compute capability 9.0).
  __device__ void arrive_expecting(unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
  }
  // Do the same with several arrivals, for which there is no single instruction.
  __device__ void arrive_expecting(unsigned arrivals, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0], %1;\n}" ::"r"(address()), "r"(arrivals)
                 : "memory");
#endif
  }
  // Start a TMA copy of a 4-D or 5-D box, which the phase waits for.
  __device__ void copy_box(void* to, const void* map, int x0, int x1, int x2, int x3) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
        "l"(map), "r"(address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
        : "memory");
#endif
  }
  __device__ void copy_box(void* to, const void* map, int x0, int x1, int x2, int x3, int x4) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
        "l"(map), "r"(address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
        : "memory");
#endif
  }
  // Start a multicast TMA copy to the same shared-memory address in each block of the cluster whose bit is set; the
  // barrier at this address in that block waits for it.
  __device__ void copy_box_to(uint16_t blocks, void* to, const void* map, int x0, int x1, int x2, int x3) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
        "l"(map), "r"(address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "h"(blocks)
        : "memory");
#endif
  }
  // Arrive, in lanes 0 to blocks - 1 of a warp, at this barrier's counterpart in block `lane` of the cluster. Relaxed
  // is enough: the arrival only says that reads are done, and a cluster-scope release would wait for the whole device.
  // Predicated instead of branching, because a branch would wait for wgmma in flight.
  __device__ void arrive_at_each(unsigned lane, unsigned blocks) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 there;\n.reg .pred mine;\nsetp.lt.u32 mine, %1, %2;\n"
        "@mine mapa.shared::cluster.u32 there, %0, %1;\n"
        "@mine mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(address()),
        "r"(lane), "r"(blocks)
        : "memory");
#endif
  }
  // Arrive once all earlier cp.async of this thread have completed.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
  }
  // Wait until the phase of this parity is complete: 0 for the first phase, 1 for the second, 0 for the third.
  __device__ void wait(unsigned parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            address()),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            address()),
        "r"(parity)
        : "memory");
#endif
  }
  // Wait with cluster scope, for arrivals and copies from other blocks of the cluster (compute capability 9.0).
  __device__ void wait_for_cluster(unsigned parity) {
#if __CUDA_ARCH__ >= 900
    unsigned done = 0;
    while (!done)
      asm volatile(
          "{ .reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done; }"
          : "=r"(done)
          : "r"(address()), "r"(parity)
          : "memory");
#endif
  }

 private:
  __device__ uint32_t address() const { return static_cast<uint32_t>(__cvta_generic_to_shared(&state)); }
};

// A cursor in a ring of stages with mbarriers: the stage index, below kPlaces or the given count, and the parity of its
// current phase. The phase before a barrier's first counts as complete, so a producer that waits for parity ^ 1 finds
// every stage free on the first lap.
template <int kPlaces>
struct Turn {
  int at = 0;
  unsigned parity = 0;
  __device__ void advance(int places = kPlaces) {
    if (++at == places) {
      at = 0;
      parity ^= 1;
    }
  }
  // Advance by at most kPlaces.
  __device__ void advance_by(int places) {
    at += places;
    if (at >= kPlaces) {
      at -= kPlaces;
      parity ^= 1;
    }
  }
};

}  // namespace specdec
