#include "core/python_tensor.h"

#include <atomic>
#include <string>

#include "core/errors.h"

namespace specdec {
namespace {

thread_local CallStream call_stream;

// type(x).__dlpack_c_exchange_api__, or null. DLPack 1.3: looked up on the type, valid for the process.
const DLPackExchangeAPI* find_api(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const void* pointer = nullptr;
  if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) pointer = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  auto* header = static_cast<const DLPackExchangeAPIHeader*>(pointer);
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) header = header->prev_api;
  auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  return api != nullptr && api->dltensor_from_py_object_no_sync != nullptr ? api : nullptr;
}

struct ApiOfType {
  PyTypeObject* type = nullptr;
  const DLPackExchangeAPI* api = nullptr;
};
// Two entries a thread: torch.Tensor beside nn.Parameter is the common mix. Each cached type keeps a reference for
// good, so that its address is never another type's.
thread_local ApiOfType api_cache[2];

const DLPackExchangeAPI* api_of(PyTypeObject* type) {
  if (api_cache[0].type == type) return api_cache[0].api;
  if (api_cache[1].type == type) return api_cache[1].api;
  Py_INCREF(type);
  Py_XDECREF(api_cache[1].type);
  api_cache[1] = api_cache[0];
  api_cache[0] = {type, find_api(type)};
  return api_cache[0].api;
}

[[noreturn]] void throw_not_a_tensor(PyObject* object) {
  PyErr_Clear();
  throw TypeError(
      std::string("expected a tensor (torch.Tensor, numpy.ndarray, or another type with __dlpack__), got ") +
      Py_TYPE(object)->tp_name);
}

// object.__dlpack__(stream=..., max_version=(1, 3)), retried without max_version for producers older than DLPack 1.0.
PyObject* export_capsule(PyObject* object) {
  PyObject* method = PyObject_GetAttrString(object, "__dlpack__");
  if (method == nullptr) throw_not_a_tensor(object);

  PyObject* device = PyObject_CallMethod(object, "__dlpack_device__", nullptr);
  long device_type = kDLCPU;
  if (device != nullptr && PyTuple_Check(device) && PyTuple_Size(device) == 2)
    device_type = PyLong_AsLong(PyTuple_GetItem(device, 0));
  Py_XDECREF(device);
  PyErr_Clear();

  PyObject* kwargs = Py_BuildValue("{s:(ii)}", "max_version", 1, 3);
  if (device_type == kDLCUDA) {
    // The array API's numbering: 1 is the legacy default stream, 0 is not allowed.
    const auto raw = reinterpret_cast<intptr_t>(call_stream.stream);
    PyObject* stream = PyLong_FromLongLong(call_stream.given && raw != 0 ? raw : 1);
    PyDict_SetItemString(kwargs, "stream", stream);
    Py_DECREF(stream);
  }
  PyObject* no_args = PyTuple_New(0);
  PyObject* capsule = PyObject_Call(method, no_args, kwargs);
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    PyDict_DelItemString(kwargs, "max_version");
    capsule = PyObject_Call(method, no_args, kwargs);
  }
  Py_DECREF(no_args);
  Py_DECREF(kwargs);
  Py_DECREF(method);
  return capsule;
}

}  // namespace

void set_call_stream(CallStream stream) { call_stream = stream; }

bool PyTensor::load(PyObject* object) {
  view.api = api_of(Py_TYPE(object));
  if (view.api == nullptr) return load_capsule(object);
  return view.api->dltensor_from_py_object_no_sync(object, &view.dl) == 0;
}

bool PyTensor::load_capsule(PyObject* object) {
  capsule_ = export_capsule(object);
  if (capsule_ == nullptr) return false;
  // The capsule is not renamed ("used_..."): its own destructor releases the tensor when this PyTensor goes.
  if (PyCapsule_IsValid(capsule_, "dltensor_versioned")) {
    auto* managed = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule_, "dltensor_versioned"));
    if (managed->version.major != DLPACK_MAJOR_VERSION)
      throw TypeError("expected a tensor in DLPack 1.x, got version " + std::to_string(managed->version.major));
    view.dl = managed->dl_tensor;
    view.read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
  } else if (PyCapsule_IsValid(capsule_, "dltensor")) {
    view.dl = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule_, "dltensor"))->dl_tensor;
  } else {
    throw_not_a_tensor(object);
  }
  return true;
}

}  // namespace specdec
