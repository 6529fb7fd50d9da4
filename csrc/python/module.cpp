// The Python module. Each room of csrc has a file here that binds its ops.
#include "python/module.h"

#include "core/errors.h"
#include "python/fast_op.h"

namespace specdec::python {
namespace {

template <class Error>
void raise_as(PyObject* type) {
  static PyObject* python_type;
  python_type = type;
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& e) {
      PyErr_SetString(python_type, e.what());
    }
  });
}

// Do nothing; `specdec bench call_overhead` times the language boundary with it.
template <class... Tensors>
int64_t noop(CallStream, const Tensors&... tensors) {
  return (tensors.ndim() + ...);
}

}  // namespace
}  // namespace specdec::python

PYBIND11_MODULE(_C_of_main_interpreter, m, pybind11::mod_gil_not_used()) {
  using namespace specdec;
  using namespace specdec::python;
  raise_as<TypeError>(PyExc_TypeError);
  raise_as<ValueError>(PyExc_ValueError);
  raise_as<NotImplementedError>(PyExc_NotImplementedError);
  raise_as<CudaError>(PyExc_RuntimeError);

  // atexit runs before interpreter shutdown.
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(&block_other_threads));

  m.attr("version") = SPECDEC_VERSION;
#ifdef SPECDEC_WITH_CUDA
  m.attr("cuda_version") = SPECDEC_CUDA_VERSION;
  m.attr("cuda_architectures") = SPECDEC_CUDA_ARCHITECTURES;
#else
  m.attr("cuda_version") = pybind11::none();
  m.attr("cuda_architectures") = pybind11::none();
#endif

  add_draft(m);
  add_tree(m);
  add_layers(m);
  add_attention(m);
  add_mla(m);
  add_verify(m);
  add_kv(m);
  add_recurrent(m);
  add_round(m);
  add_compat(m);
  add_parallel(m);
  add_ngram_index(m);
  add_replay(m);  // before the scheduler, whose constructor takes a channel
  add_scheduler(m);

  using T = TensorView;
  def_op<&noop<T>>(m, "noop1", "stream a", "take one tensor and do nothing");
  def_op<&noop<T, T, T, T>>(m, "noop4", "stream a b c d", "take four tensors and do nothing");
  def_op<&noop<T, T, T, T, T, T, T, T>>(m, "noop8", "stream a b c d e f g h", "take eight tensors and do nothing");
}

// Refuse subinterpreters: pybind11 hangs there before Python 3.12, and so would our threads that acquire the GIL.
extern "C" PYBIND11_EXPORT PyObject* PyInit__C() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit__C_of_main_interpreter();
  PyErr_SetString(PyExc_ImportError, "specdec_kernels._C is imported in a second interpreter, expected the main one");
  return nullptr;
}
