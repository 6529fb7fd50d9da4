// The Python module, and the only file that knows pybind11: one line for each op. `ops.py` documents the arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/errors.h"
#include "core/python_tensor.h"

// --- draft
#include "draft/expand_tree.h"
#include "draft/select_topk.h"
// --- tree
#include "tree/build_tree.h"
#include "tree/build_tree_from_mask.h"
#include "tree/build_tree_from_parents.h"
// --- attention
#include "attention/tree_attention.h"
// --- verify
#include "verify/commit_tokens.h"
#include "verify/verify_tree.h"
// --- kv
#include "kv/alloc_pages.h"
#include "kv/free_pages.h"
#include "kv/move_kv.h"
#include "kv/write_kv.h"
// --- ngram
#include "ngram/ngram_index.h"
// --- scheduler

namespace py = pybind11;

namespace pybind11::detail {

// Throws rather than returning false for a non-tensor: pybind11's overload error would print every argument, and a
// CUDA tensor's repr synchronises the device.
template <>
struct type_caster<specdec::TensorView> {
  static constexpr auto name = const_name("Tensor");
  bool load(handle src, bool) {
    if (!tensor_.load(src.ptr())) throw error_already_set();
    return true;
  }
  template <class>
  using cast_op_type = specdec::TensorView&;
  operator specdec::TensorView&() { return tensor_.view; }

 private:
  specdec::PyTensor tensor_;
};

template <>
struct type_caster<specdec::OptTensor> {
  static constexpr auto name = const_name("Tensor | None");
  bool load(handle src, bool) {
    if (src.is_none()) return true;
    if (!tensor_.load(src.ptr())) throw error_already_set();
    value_ = tensor_.view;
    return true;
  }
  template <class>
  using cast_op_type = specdec::OptTensor&;
  operator specdec::OptTensor&() { return value_; }

 private:
  specdec::PyTensor tensor_;
  specdec::OptTensor value_;
};

template <>
struct type_caster<specdec::CallStream> {
  static constexpr auto name = const_name("int | None");
  bool load(handle src, bool) {
    if (!src.is_none()) value_ = {true, reinterpret_cast<void*>(src.cast<intptr_t>())};
    specdec::set_call_stream(value_);
    return true;
  }
  template <class>
  using cast_op_type = specdec::CallStream;
  operator specdec::CallStream() { return value_; }

 private:
  specdec::CallStream value_;
};

}  // namespace pybind11::detail

namespace {

template <class Error>
void raise_as(py::module_& m, PyObject* type) {
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

}  // namespace

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  using namespace specdec;
  raise_as<TypeError>(m, PyExc_TypeError);
  raise_as<ValueError>(m, PyExc_ValueError);
  raise_as<NotImplementedError>(m, PyExc_NotImplementedError);
  raise_as<CudaError>(m, PyExc_RuntimeError);

#ifdef SPECDEC_WITH_CUDA
  m.attr("cuda_version") = SPECDEC_CUDA_VERSION;
  m.attr("cuda_architectures") = SPECDEC_CUDA_ARCHITECTURES;
#else
  m.attr("cuda_version") = py::none();
  m.attr("cuda_architectures") = py::none();
#endif

  // --- draft
  m.def("select_topk", &select_topk, "log-softmax and top-k of each row of logits");
  m.def("expand_root", &expand_root, "draft step 1: the root's children become candidates and frontier");
  m.def("expand_tree", &expand_tree, "a later draft step: append children, keep the best k as the frontier");

  // --- tree
  m.def("build_tree", &build_tree, "the best candidates as a tree with links, mask and positions");
  m.def("build_tree_from_parents", &build_tree_from_parents, "links, mask and positions from parent pointers");
  m.def("build_tree_from_mask", &build_tree_from_mask, "links, mask and positions from an ancestor mask");

  // --- attention
  m.def("tree_attention", &tree_attention, "attention over a paged KV prefix and a tail of tree nodes");

  // --- verify
  m.def("verify_tree", &verify_tree, "accepted drafts and bonus token, straight from the target's logits");
  m.def("commit_tokens", &commit_tokens, "cut emitted tokens at stop tokens and limits, advance the slots");

  // --- kv
  m.def("alloc_pages", &alloc_pages, "top page tables up to the rows about to be written");
  m.def("free_pages", &free_pages, "take back the pages beyond the rows that slots keep");
  m.def("write_kv", &write_kv, "scatter the valid rows of new K and V into the slots' pages");
  m.def("move_kv", &move_kv, "bring the KV rows of an accepted path together, in every layer");

  // --- ngram
  py::class_<NgramIndex>(m, "NgramIndex", "n-gram index: drafts from text seen before")
      .def(py::init<int64_t, int64_t, int64_t>())
      .def("insert", &NgramIndex::insert)
      .def("release", &NgramIndex::release)
      .def("draft", &NgramIndex::draft)
      .def("clear", &NgramIndex::clear)
      .def("statistics",
           [](const NgramIndex& index) {
             const NgramStatistics s = index.statistics();
             return py::make_tuple(s.tokens, s.entries, s.evictions, s.drafts, s.matches, s.drafted);
           })
      .def("digest", &NgramIndex::digest)
      .def_property_readonly("num_bytes", &NgramIndex::num_bytes);

  // --- scheduler

  // --- what `specdec bench call_overhead` times: the boundary alone
  m.def("noop1", [](CallStream, const TensorView& a) { return a.ndim(); });
  m.def("noop4", [](CallStream, const TensorView& a, const TensorView&, const TensorView&, const TensorView& d) {
    return a.ndim() + d.ndim();
  });
  m.def("noop8",
        [](CallStream, const TensorView& a, const TensorView&, const TensorView&, const TensorView&, const TensorView&,
           const TensorView&, const TensorView&, const TensorView& h) { return a.ndim() + h.ndim(); });
}
