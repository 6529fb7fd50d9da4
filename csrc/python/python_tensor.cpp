#include "python/python_tensor.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "core/errors.h"

namespace specdec::python {
namespace {

// An owned reference, released at the end of its scope.
struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

thread_local CallStream call_stream;

// Return type(x).__dlpack_c_exchange_api__, or null. DLPack 1.3: looked up on the type, valid for the process.
const DLPackExchangeAPI* find_api(PyTypeObject* type) {
  const Owned capsule(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  if (!PyCapsule_IsValid(capsule.get(), "dlpack_exchange_api")) return nullptr;
  auto* header =
      static_cast<const DLPackExchangeAPIHeader*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) header = header->prev_api;
  auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  return api != nullptr && api->dltensor_from_py_object_no_sync != nullptr ? api : nullptr;
}

// A permanent cache of the first eight tensor types, read without a lock or a thread-local, which would cost a tenth of
// reading the tensor. Each entry holds a reference to its type, so the address is never reused by another type. A
// process has one or two types; from the ninth on, types are looked up at every call.
struct KnownType {
  std::atomic<PyTypeObject*> type{nullptr};  // written last
  const DLPackExchangeAPI* api = nullptr;
};
KnownType known_types[8];
std::mutex known_types_mutex;

const DLPackExchangeAPI* find_and_remember_api(PyTypeObject* type) {
  const DLPackExchangeAPI* api = find_api(type);  // may run Python code: not under the lock
  const std::lock_guard lock(known_types_mutex);
  for (KnownType& known : known_types) {
    PyTypeObject* const other = known.type.load(std::memory_order_relaxed);
    if (other == type) break;
    if (other != nullptr) continue;
    Py_INCREF(type);
    known.api = api;
    known.type.store(type, std::memory_order_release);
    break;
  }
  return api;
}

const DLPackExchangeAPI* api_of(PyTypeObject* type) {
  for (const KnownType& known : known_types) {
    PyTypeObject* const other = known.type.load(std::memory_order_acquire);
    if (other == type) return known.api;
    if (other == nullptr) break;
  }
  return find_and_remember_api(type);
}

[[noreturn]] void throw_not_a_tensor(PyObject* object) {
  PyErr_Clear();
  throw TypeError(std::string("is a ") + Py_TYPE(object)->tp_name +
                  ", expected a tensor (torch.Tensor, numpy.ndarray, or another type with __dlpack__)");
}

// Return a method that every tensor has; throws TypeError if it is missing. Null with an exception set if the lookup
// fails in another way.
Owned tensor_method(PyObject* object, const char* name) {
  Owned method(PyObject_GetAttrString(object, name));
  if (method == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError)) throw_not_a_tensor(object);
  return method;
}

// Call object.__dlpack__(stream=..., max_version=(1, 3)), and again without max_version for producers older than DLPack
// 1.0. Null with an exception set if the producer raises.
Owned export_capsule(PyObject* object) {
  const Owned method = tensor_method(object, "__dlpack__");
  if (method == nullptr) return nullptr;
  const Owned device_method = tensor_method(object, "__dlpack_device__");
  if (device_method == nullptr) return nullptr;
  const Owned device(PyObject_CallNoArgs(device_method.get()));
  if (device == nullptr) return nullptr;
  if (!PyTuple_Check(device.get()) || PyTuple_Size(device.get()) != 2) throw_not_a_tensor(object);
  const long device_type = PyLong_AsLong(PyTuple_GetItem(device.get(), 0));
  if (device_type == -1 && PyErr_Occurred() != nullptr) return nullptr;

  const Owned no_args(PyTuple_New(0));
  const Owned keywords(Py_BuildValue("{s:(ii)}", "max_version", 1, 3));
  if (no_args == nullptr || keywords == nullptr) return nullptr;
  if (device_type == kDLCUDA) {
    // Array API convention: 1 is the legacy default stream, 0 is not allowed.
    const auto raw = reinterpret_cast<intptr_t>(call_stream.stream);
    const Owned stream(PyLong_FromLongLong(call_stream.given && raw != 0 ? raw : 1));
    if (stream == nullptr || PyDict_SetItemString(keywords.get(), "stream", stream.get()) != 0) return nullptr;
  }
  Owned capsule(PyObject_Call(method.get(), no_args.get(), keywords.get()));
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    if (PyDict_DelItemString(keywords.get(), "max_version") != 0) return nullptr;
    capsule.reset(PyObject_Call(method.get(), no_args.get(), keywords.get()));
  }
  return capsule;
}

}  // namespace

void set_call_stream(CallStream stream) { call_stream = stream; }

bool PyTensor::load(PyObject* object, TensorView& view) {
  view.api = api_of(Py_TYPE(object));
  if (view.api == nullptr) return load_capsule(object, view);
  return view.api->dltensor_from_py_object_no_sync(object, &view.dl) == 0;
}

bool PyTensor::load_capsule(PyObject* object, TensorView& view) {
  capsule_ = export_capsule(object).release();
  if (capsule_ == nullptr) return false;
  // The capsule is not renamed ("used_..."): its own destructor releases the tensor with this PyTensor.
  if (PyCapsule_IsValid(capsule_, "dltensor_versioned")) {
    auto* managed = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule_, "dltensor_versioned"));
    if (managed->version.major != DLPACK_MAJOR_VERSION)
      throw TypeError("is a tensor in DLPack " + std::to_string(managed->version.major) + ".x, expected 1.x");
    view.dl = managed->dl_tensor;
    view.read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
  } else if (PyCapsule_IsValid(capsule_, "dltensor")) {
    view.dl = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule_, "dltensor"))->dl_tensor;
  } else {
    throw_not_a_tensor(object);
  }
  return true;
}

}  // namespace specdec::python
