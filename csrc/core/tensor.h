// TensorView: a non-owning view of a caller's tensor, valid until the op returns to Python.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <optional>

namespace specdec {

struct TensorView {
  DLTensor dl{};                           // shape and strides point into the caller's object
  const DLPackExchangeAPI* api = nullptr;  // null: came through __dlpack__, which names no current stream
  bool read_only = false;

  int64_t ndim() const { return dl.ndim; }
  int64_t shape(int i) const { return dl.shape[i]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < dl.ndim; ++i) n *= dl.shape[i];
    return n;
  }
  // Before DLPack 1.2, strides may be null for a contiguous tensor.
  int64_t stride(int i) const {
    if (dl.strides != nullptr) return dl.strides[i];
    int64_t s = 1;
    for (int j = dl.ndim - 1; j > i; --j) s *= dl.shape[j];
    return s;
  }
  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(dl.data) + dl.byte_offset);
  }
  bool is_cuda() const { return dl.device.device_type == kDLCUDA; }
};

using OptTensor = std::optional<TensorView>;

// An address for tensors without elements; never read or written.
alignas(16) inline char no_elements[16];

// Return the data of an optional tensor, or null if the caller gave none. Ops read null as "not given", but a tensor
// without elements may have a null pointer, too: such a tensor gets the address of `no_elements`.
template <class T>
T* data_or_null(const OptTensor& t) {
  if (!t) return nullptr;
  if (t->dl.data == nullptr) return static_cast<T*>(static_cast<void*>(no_elements));
  return t->data<T>();
}

// The `stream=` keyword of an op: a raw cudaStream_t. Not given: the caller's current stream.
struct CallStream {
  bool given = false;
  void* stream = nullptr;
};

}  // namespace specdec
