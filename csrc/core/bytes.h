// Byte addresses, byte strides and copy units of tensors, independent of dtype.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/tensor.h"

namespace specdec {

inline int64_t item_bytes(const TensorView& t) { return t.dl.dtype.bits / 8; }
inline int64_t byte_stride(const TensorView& t, int i) { return t.stride(i) * item_bytes(t); }
inline char* bytes(const TensorView& t) { return t.data<char>(); }

// Return the widest copy unit (16 bytes at most) that divides all addresses, strides and last-dimension sizes of these
// tensors.
inline int64_t copy_unit(std::initializer_list<const TensorView*> tensors) {
  uint64_t together = 16;
  for (const TensorView* t : tensors) {
    const int last = static_cast<int>(t->ndim()) - 1;
    together |= reinterpret_cast<uintptr_t>(bytes(*t)) | static_cast<uint64_t>(t->shape(last) * item_bytes(*t));
    for (int i = 0; i < last; ++i) together |= static_cast<uint64_t>(byte_stride(*t, i));
  }
  return static_cast<int64_t>(together & -together);  // the lowest set bit
}

// Call f.template operator()<Unit>() with an unsigned type of `unit` bytes. CUDA code only, because of uint4 and uint2.
#ifdef __CUDACC__
template <class F>
void with_copy_unit(int64_t unit, F&& f) {
  if (unit == 16) return f.template operator()<uint4>();
#ifndef SPECDEC_COMPILE_CHECK
  if (unit == 8) return f.template operator()<uint2>();
  if (unit == 4) return f.template operator()<uint32_t>();
  if (unit == 2) return f.template operator()<uint16_t>();
  return f.template operator()<uint8_t>();
#endif
}
#endif

}  // namespace specdec
