// pybind11 casters for the argument types of ops. Their TypeErrors say what a value is and what was expected; fast_op.h
// adds the argument's name.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/errors.h"
#include "kv/alloc_pages.h"
#include "python/python_tensor.h"

namespace pybind11::detail {

// Refuses the result of `cls.__new__(cls)`, which holds no C++ object: pybind11 would read garbage.
template <class T>
struct initialised_caster : type_caster_base<T> {
  bool load(handle src, bool convert) {
    if (src && isinstance(src, get_type_handle(typeid(T), true)) && !is_holder_constructed(src.ptr()))
      throw specdec::TypeError(std::string(Py_TYPE(src.ptr())->tp_name) +
                               " is not initialised, expected __init__ to be called");
    return type_caster_base<T>::load(src, convert);
  }
};

// Throws instead of returning false for a non-tensor: pybind11's overload error would print every argument, and a CUDA
// tensor's repr synchronizes the device.
template <>
struct type_caster<specdec::TensorView> {
  static constexpr auto name = const_name("Tensor");
  bool load(handle src, bool) {
    if (!tensor_.load(src.ptr(), view_)) throw error_already_set();
    return true;
  }
  template <class>
  using cast_op_type = specdec::TensorView&;
  operator specdec::TensorView&() { return view_; }

 private:
  specdec::python::PyTensor tensor_;
  specdec::TensorView view_;
};

template <>
struct type_caster<specdec::OptTensor> {
  static constexpr auto name = const_name("Tensor | None");
  bool load(handle src, bool) {
    if (src.is_none()) return true;
    if (!tensor_.load(src.ptr(), value_.emplace())) throw error_already_set();
    return true;
  }
  template <class>
  using cast_op_type = specdec::OptTensor&;
  operator specdec::OptTensor&() { return value_; }

 private:
  specdec::python::PyTensor tensor_;
  specdec::OptTensor value_;
};

// Unpacks Python's PagePool here, which is faster than passing six arguments.
template <>
struct type_caster<specdec::kv::PoolTensors> {
  static constexpr auto name = const_name("PagePool");
  bool load(handle src, bool convert) {
    if (!PyTuple_Check(src.ptr()) || PyTuple_GET_SIZE(src.ptr()) != kTensors + 1)
      throw specdec::TypeError(std::string("is a ") + Py_TYPE(src.ptr())->tp_name + ", expected a PagePool");
    for (int i = 0; i < kTensors; ++i)
      if (!tensors_[i].load(PyTuple_GET_ITEM(src.ptr(), i), views_[i])) throw error_already_set();
    make_caster<int64_t> page_size;
    if (!page_size.load(PyTuple_GET_ITEM(src.ptr(), kTensors), convert)) return false;
    value_.page_size = cast_op<int64_t>(page_size);
    return true;
  }
  template <class>
  using cast_op_type = specdec::kv::PoolTensors&;
  operator specdec::kv::PoolTensors&() { return value_; }

 private:
  static constexpr int kTensors = 6;
  specdec::python::PyTensor tensors_[kTensors];
  specdec::TensorView views_[kTensors];
  specdec::kv::PoolTensors value_{views_[0], views_[1], views_[2], views_[3], views_[4], views_[5], 0};
};

template <>
struct type_caster<specdec::CallStream> {
  static constexpr auto name = const_name("int | None");
  type_caster() = default;
  ~type_caster() {
    if (value_.given) specdec::python::set_call_stream({});  // the call is over
  }
  bool load(handle src, bool convert) {
    if (!src.is_none()) {
      make_caster<intptr_t> raw;
      if (!raw.load(src, convert))
        throw specdec::TypeError(std::string("is a ") + Py_TYPE(src.ptr())->tp_name +
                                 ", expected None or a raw cudaStream_t as an int");
      value_ = {true, reinterpret_cast<void*>(cast_op<intptr_t>(raw))};
      specdec::python::set_call_stream(value_);
    }
    return true;
  }
  template <class>
  using cast_op_type = specdec::CallStream;
  operator specdec::CallStream() { return value_; }

 private:
  specdec::CallStream value_;
};

}  // namespace pybind11::detail
