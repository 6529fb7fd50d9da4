// Conversion of any Python tensor to a TensorView: by the DLPack C exchange API if the type has it, else by __dlpack__.
#pragma once

#include <Python.h>

#include "core/tensor.h"

namespace specdec::python {

// Owns what keeps a view's tensor alive: the capsule, for the __dlpack__ fallback.
class PyTensor {
 public:
  PyTensor() = default;
  PyTensor(const PyTensor&) = delete;
  PyTensor& operator=(const PyTensor&) = delete;
  ~PyTensor() { Py_XDECREF(capsule_); }

  // Read a view. Throws TypeError for a non-tensor; returns false with a Python exception set if the producer refuses.
  bool load(PyObject* object, TensorView& view);

 private:
  bool load_capsule(PyObject* object, TensorView& view);
  PyObject* capsule_ = nullptr;
};

// Set the `stream=` of the call being converted. It is the first argument of every op, so that a CUDA producer without
// the exchange API (CuPy, JAX) receives the stream that its data must be ready on. Thread-local, set by every call.
void set_call_stream(CallStream stream);

}  // namespace specdec::python
