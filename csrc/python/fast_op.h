// Bindings of ops as METH_FASTCALL functions that read their arguments with pybind11's casters. pybind11's own
// dispatcher searches for overloads, keywords and defaults, which ops do not have, and takes as long as reading a
// tensor.
#pragma once

#include <string>
#include <tuple>
#include <utility>

#include "python/casters.h"
#include "python/gil.h"

namespace specdec::python {

namespace py = pybind11;

// The name of an argument's type in messages.
template <class T>
inline constexpr const char* kTypeName = "tensor";  // unused: its caster throws a message of its own
template <>
inline constexpr const char* kTypeName<kv::PoolTensors> = "PagePool";
template <>
inline constexpr const char* kTypeName<int64_t> = "int of 64 bits";
template <>
inline constexpr const char* kTypeName<std::optional<int64_t>> = "int of 64 bits or None";
template <>
inline constexpr const char* kTypeName<double> = "float";
template <>
inline constexpr const char* kTypeName<std::optional<double>> = "float or None";
template <>
inline constexpr const char* kTypeName<bool> = "bool";
template <>
inline constexpr const char* kTypeName<std::string> = "str";
template <>
inline constexpr const char* kTypeName<std::optional<std::string>> = "str or None";

// Return the name of an op's argument (self not counted) from _C.pyi, or its index if that cannot be read.
std::string argument_name(const char* op, size_t i);

template <class T>
decltype(auto) read_argument(py::detail::make_caster<T>& caster, PyObject* object, const char* op, size_t i) try {
  if (!caster.load(object, true))
    throw TypeError(std::string("is a ") + Py_TYPE(object)->tp_name + ", expected " + kTypeName<std::decay_t<T>>);
  return py::detail::cast_op<T>(caster);
} catch (const TypeError& error) {
  throw TypeError(std::string(op) + ": " + argument_name(op, i) + " " + error.what());
}

template <class... Args>
struct Arguments {
  // Convert the arguments and call `function`.
  template <class Function>
  static PyObject* pass_to(const Function& function, const char* op, PyObject* const* objects,
                           Py_ssize_t num_objects) try {
    if (num_objects != sizeof...(Args))
      throw TypeError(std::string(op) + ": " + std::to_string(num_objects) + " arguments, expected " +
                      std::to_string(sizeof...(Args)));
    return pass_to(function, op, objects, std::index_sequence_for<Args...>());
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    py::detail::try_translate_exceptions();
    return nullptr;
  }

 private:
  template <class Function, size_t... I>
  static PyObject* pass_to(const Function& function, const char* op, PyObject* const* objects,
                           std::index_sequence<I...>) {
    std::tuple<py::detail::make_caster<Args>...> casters;
    std::tuple<decltype(read_argument<Args>(std::get<I>(casters), nullptr, nullptr, 0))...> arguments{
        read_argument<Args>(std::get<I>(casters), objects[I], op, I)...};  // braces: in this order
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

  static PyObject* call(PyObject*, PyObject* const* objects, Py_ssize_t num_objects) {
    return Arguments<Args...>::pass_to(function, method.ml_name, objects, num_objects);
  }
};

// A method; runs without the GIL.
template <class Class, class... Args, void (Class::*function)(Args...)>
struct Op<function> {
  static inline PyMethodDef method;

  static PyObject* call(PyObject* self, PyObject* const* objects, Py_ssize_t num_objects) {
    const auto run = [&](auto&&... arguments) {
      auto& object = py::cast<Class&>(py::handle(self));
      const WithoutGil released;
      (object.*function)(arguments...);
    };
    return Arguments<Args...>::pass_to(run, method.ml_name, objects, num_objects);
  }
};

template <auto function>
PyMethodDef* method_of(const char* name, const char* doc) {
  Op<function>::method = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Op<function>::call)),
                          METH_FASTCALL, doc};
  return &Op<function>::method;
}

template <auto function>
void def_op(py::module_& m, const char* name, const char* doc) {
  PyObject* op = PyCFunction_NewEx(method_of<function>(name, doc), nullptr, m.attr("__name__").ptr());
  m.add_object(name, py::reinterpret_steal<py::object>(op));
}

template <auto function>
void def_method(py::handle type, const char* name, const char* doc) {
  PyObject* method = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), method_of<function>(name, doc));
  py::setattr(type, name, py::reinterpret_steal<py::object>(method));
}

}  // namespace specdec::python
