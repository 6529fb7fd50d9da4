// A barrier in shared memory (mbarrier, compute capability 8.0) between warps that do not wait for each other
// otherwise, or that counts what is sent there.
#pragma once

#include <cstdint>

namespace specdec {

struct Mbarrier {
  uint64_t state;

  __device__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  // What this thread did before is seen by whoever waited.
  __device__ void arrive() {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address()) : "memory");
  }
  // An arrival after which the phase lasts until so many bytes have come besides (compute capability 9.0).
  __device__ void arrive_expecting(unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
  }
  // The same with more arrivals than one, which no one instruction makes.
  __device__ void arrive_expecting(unsigned arrivals, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0], %1;\n}" ::"r"(address()), "r"(arrivals)
                 : "memory");
#endif
  }
  // Starts the copy of a box of four dimensions, which the phase waits for.
  __device__ void copy_box(void* to, const void* map, int x0, int x1, int x2, int x3) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
        "l"(map), "r"(address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
        : "memory");
#endif
  }
  // The same to this place in each block of the cluster whose bit is set, where the barrier of this place waits for it.
  __device__ void copy_box_to(uint16_t blocks, void* to, const void* map, int x0, int x1, int x2, int x3) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
        "l"(map), "r"(address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "h"(blocks)
        : "memory");
#endif
  }
  // By lanes 0 to blocks - 1 of a warp, an arrival at the barrier of this place in block `lane` of the cluster. Nothing
  // is to be seen behind it that was written, only read, so that it has not to be a release for the cluster, which
  // would wait for the whole device. Without a branch, beside which products would be waited for.
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
  // One of the barrier's arrivals, made when all cp.async of this thread so far have landed.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
  }
  // Until the phase of this parity is over: 0 for the first, 1 for the second, 0 for the third.
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
  // The same, where what was counted in came from other blocks of the cluster (compute capability 9.0).
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

// Walks around a ring whose places have barriers: the place, of kPlaces or fewer, and the parity of its barrier's
// phase. The phase before a barrier's first counts as over: who waits for the parity that is not this one finds each
// place free on the first lap.
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
  // By up to kPlaces.
  __device__ void advance_by(int places) {
    at += places;
    if (at >= kPlaces) {
      at -= kPlaces;
      parity ^= 1;
    }
  }
};

}  // namespace specdec
