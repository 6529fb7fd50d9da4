// A block's part of an exchange on a GPU: 16-byte writes to the other GPUs' memory, and reads of this one's until all
// words have arrived.
//
// A thread waits only for packs that the same thread of the same block wrote on the other ranks, before it waited
// itself. So blocks need not all run at once: those that run have started in the same order everywhere.
#pragma once

#include "core/pack.cuh"
#include "core/warp.cuh"
#include "parallel/exchange.h"
#include "round/clock.h"

namespace specdec::parallel {

__device__ __forceinline__ uint4 load_arrived(const uint4* from) {
  uint4 pack;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
               : "l"(from)
               : "memory");
  return pack;
}
__device__ __forceinline__ void store_to_rank(uint4* to, uint4 pack) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.x), "r"(pack.y), "r"(pack.z),
               "r"(pack.w)
               : "memory");
}
__device__ __forceinline__ bool has_arrived(const uint4& pack) {
  return pack.x != kEmpty && pack.y != kEmpty && pack.z != kEmpty && pack.w != kEmpty;
}
__device__ __forceinline__ uint4 without_negative_zeros(const uint4& pack) {
  return {without_negative_zero(pack.x), without_negative_zero(pack.y), without_negative_zero(pack.z),
          without_negative_zero(pack.w)};
}

template <int kSize>
struct Exchange {
  uint4* buffers[kSize];  // of all ranks
  uint4* own;             // of this rank
  const uint4* x;
  ExchangeState* state;
  int64_t capacity, timeout_ns;
  int rank;
  uint32_t phase;
  bool is_over;

  // Read what no kernel writes: may be called before the previous kernels have finished.
  __device__ __forceinline__ explicit Exchange(const ExchangeParams& p)
      : own(reinterpret_cast<uint4*>(p.buffers[p.rank])),
        x(static_cast<const uint4*>(p.x)),
        state(p.state),
        capacity(p.capacity),
        timeout_ns(p.timeout_ns),
        rank(static_cast<int>(p.rank)),
        phase(0),
        is_over(false) {
#pragma unroll
    for (int r = 0; r < kSize; ++r) buffers[r] = reinterpret_cast<uint4*>(p.buffers[r]);
  }

  __device__ __forceinline__ int64_t at(uint32_t of_phase, int source) const {
    return (static_cast<int64_t>(of_phase) * kSize + source) * capacity;
  }

  // Begin the call, once the previous kernels have finished.
  __device__ __forceinline__ void begin() {
    phase = *static_cast<volatile uint32_t*>(&state->calls) % kPhases;
    is_over = *static_cast<volatile uint32_t*>(&state->timed_out) != 0;
  }

  // Write pack i of x to the other ranks.
  __device__ __forceinline__ void push(int64_t i) const {
    if (is_over) return;
    const uint4 pack = without_negative_zeros(x[i]);
#pragma unroll
    for (int r = 0; r < kSize; ++r)
      if (r != rank) store_to_rank(buffers[r] + at(phase, rank) + i, pack);
  }

  // Empty this block's share of what the call before has read.
  __device__ __forceinline__ void empty_phase_before() const {
    const uint32_t before = (phase + kPhases - 1) % kPhases;
    const int64_t written = *static_cast<volatile uint32_t*>(&state->written[before]);
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 1  // few iterations; to count them would take a division
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < written; i += step)
#pragma unroll
      for (int r = 0; r < kSize; ++r)
        if (r != rank) own[at(before, r) + i] = {kEmpty, kEmpty, kEmpty, kEmpty};
  }

  // Return pack i of all ranks. All loads are in flight before the first wait.
  __device__ __forceinline__ void wait_for(int64_t i, uint4 (&packs)[kSize]) const {
#pragma unroll
    for (int r = 0; r < kSize; ++r) packs[r] = r == rank ? x[i] : load_arrived(own + at(phase, r) + i);
    uint32_t polls = 0;
    int64_t start = 0;
    bool gives_up = is_over;
#pragma unroll
    for (int r = 0; r < kSize; ++r) {
      if (r == rank) continue;
      while (!gives_up && !has_arrived(packs[r])) {
        packs[r] = load_arrived(own + at(phase, r) + i);
        if (++polls % 256 != 0) continue;
        const int64_t now = round::nanoseconds();
        if (start == 0) start = now;
        const bool is_late = now - start > timeout_ns;
        if (is_late) set_timed_out(*state, r);
        gives_up = is_late || *static_cast<volatile uint32_t*>(&state->timed_out) != 0;
      }
      if (gives_up) packs[r] = {0, 0, 0, 0};
    }
  }

  // Return the sum of pack i over the ranks, added in their order in float32 and rounded once.
  template <class T>
  __device__ __forceinline__ Pack<T, kPackBytes / sizeof(T)> sum(int64_t i) const {
    constexpr int N = kPackBytes / sizeof(T);
    using P = Pack<T, N>;
    uint4 packs[kSize];
    wait_for(i, packs);
    float sums[N] = {};
#pragma unroll
    for (int r = 0; r < kSize; ++r) {
      float values[N];
      unpack(*reinterpret_cast<const P*>(&packs[r]), values);
#pragma unroll
      for (int n = 0; n < N; ++n) sums[n] += values[n];
    }
    return pack_of<T>(sums);
  }

  // Count the call: by one thread per block, once all threads of its block have begun.
  __device__ __forceinline__ void finish(int64_t packs) const {
    if (atomicInc(&state->ticket, gridDim.x - 1) != gridDim.x - 1) return;
    state->written[phase] = static_cast<uint32_t>(packs);
    state->calls += 1;
  }
};

// Call f.template operator()<kSize>() with the number of ranks, checked before.
template <class F>
void with_size(int64_t size, F&& f) {
  if (size == 2) return f.template operator()<2>();
  if (size == 4) return f.template operator()<4>();
  f.template operator()<8>();
}

}  // namespace specdec::parallel
