// Tensor-core multiplication by wgmma (compute capability 9.0): instructions, operand descriptors and fences.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <utility>

#include "core/cuda.cuh"
#include "core/floats.h"

namespace specdec {

// A warpgroup's multiplication: 64 rows of A, 32 bytes each, from shared memory or registers, by 32 bytes x N of B from
// shared memory.
template <class T, int N, cute::SM90::GMMA::Major kMajorB>
struct Wgmma {
  using Element =
      std::conditional_t<std::is_same_v<T, BFloat16>, cutlass::bfloat16_t,
                         std::conditional_t<std::is_same_v<T, Float8>, cutlass::float_e4m3_t, cutlass::half_t>>;
  using Shape = cute::Shape<cute::_64, cute::Int<N>, cute::Int<32 / sizeof(T)>>;
  using FromShared =
      decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, float, Shape, cute::SM90::GMMA::Major::K, kMajorB>());
  using FromRegisters =
      decltype(cute::SM90::GMMA::rs_op_selector<Element, Element, float, Shape, cute::SM90::GMMA::Major::K, kMajorB>());

  // d = a b, or d += a b.
  __device__ static void multiply(uint64_t a, uint64_t b, bool add, float (&d)[N / 8][4]) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      FromShared::fma(a, b, d[I / 4][I % 4]...,
                      add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
    }(std::make_index_sequence<N / 2>());
  }
  __device__ static void multiply(const uint32_t (&a)[4], uint64_t b, bool add, float (&d)[N / 8][4]) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      FromRegisters::fma(a[0], a[1], a[2], a[3], b, d[I / 4][I % 4]...,
                         add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
    }(std::make_index_sequence<N / 2>());
  }
};

// Return the descriptor of an operand in panels of kLine bytes per row, swizzled like a Stage, that start at a multiple
// of 8 rows. panel_bytes, the distance between 64 rows of A or columns of B and the next 64, matters only for MN-major
// operands. group_bytes is the distance between 8 rows of a panel and the next 8.
template <int kLine = 128>
__device__ __forceinline__ uint64_t wgmma_operand(const void* start, int panel_bytes, int group_bytes = 8 * kLine) {
  using cute::SM90::GMMA::LayoutType;
  constexpr LayoutType kLayout = kLine == 128 ? LayoutType::B128 : kLine == 64 ? LayoutType::B64 : LayoutType::B32;
  cute::GmmaDescriptor d;
  d.bitfield.start_address_ = static_cast<uint16_t>(__cvta_generic_to_shared(start) >> 4);
  d.bitfield.leading_byte_offset_ = static_cast<uint16_t>(panel_bytes >> 4);
  d.bitfield.stride_byte_offset_ = static_cast<uint16_t>(group_bytes >> 4);
  d.bitfield.layout_type_ = static_cast<uint8_t>(kLayout);
  return d;
}

// A wgmma descriptor, and descriptors at byte offsets from it, as warp-uniform values: the compiler then computes them
// once per warp, in the uniform registers that wgmma reads.
class WarpOperand {
 public:
  __device__ explicit WarpOperand(uint64_t operand)
      : high_(operand >> 32 << 32), low_(__shfl_sync(kFullMask, static_cast<uint32_t>(operand), 0)) {}
  __device__ uint64_t offset(int bytes) const { return high_ | (low_ + (bytes >> 4)); }

 private:
  const uint64_t high_;
  const uint32_t low_;  // contains the address
};

// Make this thread's plain stores to shared memory, and the cp.async it has waited for, visible to wgmma.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keep the compiler from moving accesses to wgmma's registers across a wait.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) cute::warpgroup_fence_operand(x[n][e]);
}

}  // namespace specdec
