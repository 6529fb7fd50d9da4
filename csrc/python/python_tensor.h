// From any Python tensor to a TensorView: the DLPack C exchange API where the type has it, else __dlpack__.
#pragma once

#include <Python.h>

#include "core/tensor.h"

namespace specdec::python {

// A Python tensor that a view is read from: for the __dlpack__ fallback, the capsule that keeps it alive.
class PyTensor {
 public:
  PyTensor() = default;
  PyTensor(const PyTensor&) = delete;
  PyTensor& operator=(const PyTensor&) = delete;
  ~PyTensor() { Py_XDECREF(capsule_); }

  // Throws TypeError for a non-tensor. Returns false with a Python exception set when the producer refuses.
  bool load(PyObject* object, TensorView& view);

 private:
  bool load_capsule(PyObject* object, TensorView& view);
  PyObject* capsule_ = nullptr;
};

// The `stream=` of the call being converted. It is the first argument of every op, so that a CUDA producer without
// the exchange API (CuPy, JAX) can be told the stream its data must be ready on. Thread-local, set by every call.
void set_call_stream(CallStream stream);

}  // namespace specdec::python
