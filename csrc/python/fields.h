// Binds structs with named fields: a constructor that takes keywords, and read-only attributes. Each field is one line.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace specdec::python {

namespace py = pybind11;

// A keyword of the constructor: `set` stores its value, `bind` adds the attribute.
template <class Value, class Argument, class Set, class Bind>
struct Field {
  using type = Value;
  Argument argument;
  Set set;
  Bind bind;
};
template <class Value, class Argument, class Set, class Bind>
Field<Value, Argument, Set, Bind> make_field(Argument argument, Set set, Bind bind) {
  return {std::move(argument), std::move(set), std::move(bind)};
}

// A field without a default.
template <class Struct, class Value>
auto required(const char* name, Value Struct::* member) {
  return make_field<Value>(
      py::arg(name), [=](Struct& made, Value value) { made.*member = std::move(value); },
      [=](py::class_<Struct>& bound) { bound.def_readonly(name, member); });
}
// A field whose default is that of the struct.
template <class Struct, class Value>
auto optional(const char* name, Value Struct::* member) {
  return make_field<Value>(
      py::arg(name) = Struct{}.*member, [=](Struct& made, Value value) { made.*member = std::move(value); },
      [=](py::class_<Struct>& bound) { bound.def_readonly(name, member); });
}
// A field of a struct within the struct.
template <class Struct, class Part, class Value>
auto optional(const char* name, Part Struct::* part, Value Part::* member) {
  return make_field<Value>(
      py::arg(name) = Struct{}.*part.*member, [=](Struct& made, Value value) { made.*part.*member = std::move(value); },
      [=](py::class_<Struct>& bound) {
        bound.def_property_readonly(name, [=](const Struct& made) { return made.*part.*member; });
      });
}
// Fields of any Python object, which `set` converts; they have no attribute.
template <class Set>
auto required_object(const char* name, Set set) {
  return make_field<py::object>(py::arg(name), std::move(set), [](auto&) {});
}
template <class Set>
auto optional_object(const char* name, py::object fallback, Set set) {
  return make_field<py::object>(py::arg(name) = std::move(fallback), std::move(set), [](auto&) {});
}

// Defines the constructor and the attributes.
template <class Struct, class... Fields>
void def_fields(py::class_<Struct>& bound, Fields... fields) {
  bound.def(py::init([... set = fields.set](typename Fields::type... values) {
              Struct made{};
              (set(made, std::move(values)), ...);
              return made;
            }),
            py::kw_only(), fields.argument...);
  (fields.bind(bound), ...);
}

}  // namespace specdec::python
