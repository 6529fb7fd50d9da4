// Bindings of ops as METH_FASTCALL functions that read their arguments with pybind11's casters. pybind11's own
// dispatcher searches for overloads, keywords and defaults, which ops do not have, and takes as long as reading a
// tensor.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/casters.h"
#include "python/gil.h"

namespace specdec::python {

namespace py = pybind11;

// Names of a type in messages and in signatures (_C.pyi).
struct TypeNames {
  const char* message;
  const char* stub;
};
template <class T>
inline constexpr TypeNames kTypeNames{"tensor", "Tensor"};  // the casters of tensors throw messages of their own
template <>
inline constexpr TypeNames kTypeNames<OptTensor>{"tensor", "Tensor | None"};
template <>
inline constexpr TypeNames kTypeNames<CallStream>{"tensor", "int | None"};  // as above
template <>
inline constexpr TypeNames kTypeNames<kv::PoolTensors>{"PagePool", "PagePool"};
template <>
inline constexpr TypeNames kTypeNames<int64_t>{"int of 64 bits", "int"};
template <>
inline constexpr TypeNames kTypeNames<std::optional<int64_t>>{"int of 64 bits or None", "int | None"};
template <>
inline constexpr TypeNames kTypeNames<double>{"float", "float"};
template <>
inline constexpr TypeNames kTypeNames<std::optional<double>>{"float or None", "float | None"};
template <>
inline constexpr TypeNames kTypeNames<bool>{"bool", "bool"};
template <>
inline constexpr TypeNames kTypeNames<std::string>{"str", "str"};
template <>
inline constexpr TypeNames kTypeNames<std::optional<std::string>>{"str or None", "str | None"};
template <>
inline constexpr TypeNames kTypeNames<std::pair<std::string, int>>{"", "tuple[str, int]"};  // a result
template <>
inline constexpr TypeNames kTypeNames<void>{"", "None"};  // a result

// The names of an op: its own and those of its arguments. `doc` begins with the signature, as pybind11's docstrings do.
struct OpNames {
  std::string op, doc;
  std::vector<std::string> arguments;
};

// Split the names of arguments (separated by spaces) and write the signature.
//
// Throws std::logic_error if their number is not that of `types`.
OpNames op_names(const char* op, const char* arguments, const char* doc, const std::vector<const char*>& types,
                 const char* result);

template <class T>
decltype(auto) read_argument(py::detail::make_caster<T>& caster, PyObject* object, const OpNames& names, size_t i) try {
  if (!caster.load(object, true))
    throw TypeError(std::string("is a ") + Py_TYPE(object)->tp_name + ", expected " +
                    kTypeNames<std::decay_t<T>>.message);
  return py::detail::cast_op<T>(caster);
} catch (const TypeError& error) {
  throw TypeError(names.op + ": " + names.arguments[i] + " " + error.what());
}

template <class... Args>
struct Arguments {
  // Convert the arguments and call `function`.
  template <class Function>
  static PyObject* pass_to(const Function& function, const OpNames& names, PyObject* const* objects,
                           Py_ssize_t num_objects) try {
    if (num_objects != sizeof...(Args))
      throw TypeError(names.op + ": " + std::to_string(num_objects) + " arguments, expected " +
                      std::to_string(sizeof...(Args)));
    return pass_to(function, names, objects, std::index_sequence_for<Args...>());
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    py::detail::try_translate_exceptions();
    return nullptr;
  }

 private:
  template <class Function, size_t... I>
  static PyObject* pass_to(const Function& function, const OpNames& names, PyObject* const* objects,
                           std::index_sequence<I...>) {
    std::tuple<py::detail::make_caster<Args>...> casters;
    std::tuple<decltype(read_argument<Args>(std::get<I>(casters), nullptr, names, 0))...> arguments{
        read_argument<Args>(std::get<I>(casters), objects[I], names, I)...};  // braces: in this order
    if constexpr (std::is_void_v<decltype(std::apply(function, arguments))>) {
      std::apply(function, arguments);
      Py_RETURN_NONE;
    } else {
      return py::cast(std::apply(function, arguments)).release().ptr();
    }
  }
};

template <auto function>
struct Op;

template <class Result, class... Args, Result (*function)(Args...)>
struct Op<function> {
  static inline PyMethodDef method;
  static inline OpNames names;

  static OpNames names_of(const char* op, const char* arguments, const char* doc) {
    return op_names(op, arguments, doc, {kTypeNames<std::decay_t<Args>>.stub...},
                    kTypeNames<std::decay_t<Result>>.stub);
  }

  static PyObject* call(PyObject*, PyObject* const* objects, Py_ssize_t num_objects) {
    return Arguments<Args...>::pass_to(function, names, objects, num_objects);
  }
};

// A method; runs without the GIL.
template <class Class, class... Args, void (Class::*function)(Args...)>
struct Op<function> {
  static inline PyMethodDef method;
  static inline OpNames names;

  static OpNames names_of(const char* op, const char* arguments, const char* doc) {
    return op_names(op, arguments, doc, {kTypeNames<std::decay_t<Args>>.stub...}, "None");
  }

  static PyObject* call(PyObject* self, PyObject* const* objects, Py_ssize_t num_objects) {
    const auto run = [&](auto&&... arguments) {
      auto& object = py::cast<Class&>(py::handle(self));
      const WithoutGil released;
      (object.*function)(arguments...);
    };
    return Arguments<Args...>::pass_to(run, names, objects, num_objects);
  }
};

template <auto function>
PyMethodDef* method_of(const char* name, const char* arguments, const char* doc) {
  OpNames& names = Op<function>::names = Op<function>::names_of(name, arguments, doc);
  Op<function>::method = {names.op.c_str(),
                          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Op<function>::call)),
                          METH_FASTCALL, names.doc.c_str()};
  return &Op<function>::method;
}

// Add an op to the module. `arguments` names the parameters of `function` in order, separated by spaces.
template <auto function>
void def_op(py::module_& m, const char* name, const char* arguments, const char* doc) {
  PyObject* op = PyCFunction_NewEx(method_of<function>(name, arguments, doc), nullptr, m.attr("__name__").ptr());
  m.add_object(name, py::reinterpret_steal<py::object>(op));
}

template <auto function>
void def_method(py::handle type, const char* name, const char* arguments, const char* doc) {
  PyObject* method =
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), method_of<function>(name, arguments, doc));
  py::setattr(type, name, py::reinterpret_steal<py::object>(method));
}

}  // namespace specdec::python
