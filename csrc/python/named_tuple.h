// Tuples with named fields: as cheap to make as a tuple, and read by name in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace specdec::python {

// A tuple type of the module, made with the values of its fields in order.
template <size_t kNumFields>
class NamedTuple {
 public:
  // `qualified_name` begins with the module's name. All texts have static storage.
  NamedTuple(pybind11::module_& m, const char* qualified_name, const char* doc,
             const std::array<const char*, kNumFields>& names) {
    std::array<PyStructSequence_Field, kNumFields + 1> fields{};
    for (size_t i = 0; i < kNumFields; ++i) fields[i].name = names[i];
    PyStructSequence_Desc description{qualified_name, doc, fields.data(), static_cast<int>(kNumFields)};
    type_ = PyStructSequence_NewType(&description);
    if (type_ == nullptr) throw pybind11::error_already_set();
    const pybind11::handle type = reinterpret_cast<PyObject*>(type_);
    m.attr(type.attr("__name__")) = type;
  }

  template <class... Values>
  pybind11::object operator()(Values&&... values) const {
    static_assert(sizeof...(values) == kNumFields);
    auto tuple = pybind11::reinterpret_steal<pybind11::object>(PyStructSequence_New(type_));
    if (!tuple) throw pybind11::error_already_set();
    Py_ssize_t i = 0;
    (PyStructSequence_SetItem(tuple.ptr(), i++, object_of(std::forward<Values>(values)).release().ptr()), ...);
    return tuple;
  }

 private:
  static pybind11::object object_of(pybind11::object value) { return value; }
  static pybind11::object object_of(int64_t value) { return pybind11::int_(value); }

  PyTypeObject* type_;
};

}  // namespace specdec::python
