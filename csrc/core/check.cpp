#include "core/check.h"

#include <cfloat>
#include <limits>

#include "core/errors.h"

namespace specdec {
namespace {

struct DtypeName {
  Dtypes bit;
  uint8_t code, bits;
  const char* name;
};
constexpr DtypeName kDtypeNames[] = {
    {kInt32, kDLInt, 32, "int32"},          {kInt64, kDLInt, 64, "int64"},
    {kFloat32, kDLFloat, 32, "float32"},    {kFloat16, kDLFloat, 16, "float16"},
    {kBFloat16, kDLBfloat, 16, "bfloat16"}, {kFloat8, kDLFloat8_e4m3fn, 8, "float8_e4m3fn"},
    {kUInt8, kDLUInt, 8, "uint8"},
};

std::string dtype_name(DLDataType d) {
  for (const DtypeName& n : kDtypeNames)
    if (n.code == d.code && n.bits == d.bits && d.lanes == 1) return n.name;
  if (d.lanes == 1 && d.code == kDLBool) return "bool";
  const char* kind = d.code == kDLInt       ? "int"
                     : d.code == kDLUInt    ? "uint"
                     : d.code == kDLFloat   ? "float"
                     : d.code == kDLComplex ? "complex"
                                            : nullptr;
  if (kind != nullptr && d.lanes == 1) return kind + std::to_string(d.bits);
  return "DLPack dtype (" + std::to_string(d.code) + ", " + std::to_string(d.bits) + ", " + std::to_string(d.lanes) +
         ")";
}

std::string dtype_names(Dtypes set) {
  std::string s;
  for (const DtypeName& n : kDtypeNames)
    if (set.bits & n.bit.bits) s += (s.empty() ? "" : " or ") + std::string(n.name);
  return s;
}

std::string device_name(DLDevice d) {
  if (d.device_type == kDLCPU || d.device_type == kDLCUDAHost) return "cpu";
  if (d.device_type == kDLCUDA) return "cuda:" + std::to_string(d.device_id);
  return "DLPack device (" + std::to_string(d.device_type) + ", " + std::to_string(d.device_id) + ")";
}

bool same_device(DLDevice a, DLDevice b) {
  const bool host_a = a.device_type != kDLCUDA, host_b = b.device_type != kDLCUDA;
  return host_a == host_b && (host_a || a.device_id == b.device_id);
}

std::string shape_of(const TensorView& t) {
  std::string s = "[";
  for (int i = 0; i < t.ndim(); ++i) s += (i ? ", " : "") + std::to_string(t.shape(i));
  return s + "]";
}

std::string expected_shape(Shape shape) {
  std::string s = "[";
  for (const ShapeItem* it = shape.begin(); it != shape.end(); ++it) {
    if (it != shape.begin()) s += ", ";
    if (it->dim == nullptr) {
      s += std::to_string(it->number);
    } else {
      s += it->dim->name;
      if (it->dim->value >= 0) s.append("=").append(std::to_string(it->dim->value));
    }
  }
  return s + "]";
}

bool is_contiguous(const TensorView& t, int from) {
  int64_t expected = 1;
  for (int i = t.dl.ndim - 1; i >= from && i >= 0; --i) {
    if (t.shape(i) == 0) return true;
    if (t.shape(i) != 1 && t.stride(i) != expected) return false;
    expected *= t.shape(i);
  }
  return true;
}

}  // namespace

Dtypes dtype_of(const TensorView& t) {
  for (const DtypeName& n : kDtypeNames)
    if (n.code == t.dl.dtype.code && n.bits == t.dl.dtype.bits && t.dl.dtype.lanes == 1) return n.bit;
  return {0};
}

std::string Word::text() const {
  struct {
    std::string operator()(std::string_view text) const { return std::string(text); }
    std::string operator()(int64_t number) const { return std::to_string(number); }
    std::string operator()(double number) const { return std::to_string(number); }
    std::string operator()(DLDataType dtype) const { return dtype_name(dtype); }
  } as_text;
  return std::visit(as_text, part_);
}

std::string Phrase::text() const {
  std::string text;
  for (const Word& word : words_) text += word.text();
  return text;
}

void Check::fail(const char* name, const std::string& is, const std::string& expected) const {
  throw ValueError(std::string(op_) + ": " + name + " " + is + ", expected " + expected);
}

void Check::common(const char* name, const TensorView& t, Shape shape, Dtypes dtypes, int contiguous_from) {
  if (!(dtype_of(t).bits & dtypes.bits)) fail(name, "is " + dtype_name(t.dl.dtype), dtype_names(dtypes));

  // Compare first and bind after, so that the message names only what earlier tensors fixed.
  bool match = t.ndim() == static_cast<int64_t>(shape.size());
  for (int i = 0; match && i < t.ndim(); ++i) {
    const ShapeItem& item = shape.begin()[i];
    int64_t want = item.dim ? item.dim->value : item.number;
    for (int j = 0; want < 0 && j < i; ++j)  // a size that occurs twice in one shape
      if (shape.begin()[j].dim == item.dim) want = t.shape(j);
    match = t.shape(i) == want || (item.dim && want < 0);
  }
  if (!match) fail(name, "has shape " + shape_of(t), expected_shape(shape));
  for (int i = 0; i < t.ndim(); ++i)
    if (Dim* d = shape.begin()[i].dim) d->value = t.shape(i);
  memory(name, t, contiguous_from);
}

// Check a tensor's device, contiguity, storage and alignment.
void Check::memory(const char* name, const TensorView& t, int contiguous_from) {
  const DLDevice device = t.dl.device;
  if (device.device_type != kDLCPU && device.device_type != kDLCUDAHost && device.device_type != kDLCUDA)
    fail(name, "is on " + device_name(device), "cpu or cuda");
  if (first_name_ == nullptr) {
    first_name_ = name;
    first_ = t;
  } else if (!same_device(device, first_.dl.device)) {
    fail(name, "is on " + device_name(device), device_name(first_.dl.device) + " like " + first_name_);
  }

  if (!is_contiguous(t, contiguous_from < 0 ? t.dl.ndim + contiguous_from : contiguous_from))
    fail(name,
         "has shape " + shape_of(t) + " and is not contiguous" + (contiguous_from < 0 ? " in its last dimension" : ""),
         contiguous_from < 0 ? "a last stride of 1" : "a contiguous tensor");
  if (t.dl.data == nullptr && t.numel() > 0) fail(name, "has no storage (a fake tensor?)", "a tensor with data");
  const uintptr_t item_bytes = t.dl.dtype.bits / 8;  // a power of two
  if ((reinterpret_cast<uintptr_t>(t.data<void>()) & (item_bytes - 1)) != 0)
    fail(name, "starts between two multiples of its " + std::to_string(item_bytes) + "-byte elements",
         "an aligned tensor");
}

void Check::tensor(const char* name, const TensorView& t, Shape shape, Dtypes dtypes) {
  common(name, t, shape, dtypes, 0);
}

void Check::strided(const char* name, const TensorView& t, Shape shape, Dtypes dtypes) {
  common(name, t, shape, dtypes, -1);
}

void Check::matrices(const char* name, const TensorView& t, Shape shape, Dtypes dtypes) {
  const int ndim = static_cast<int>(t.ndim());
  common(name, t, shape, dtypes, ndim);
  if (t.stride(ndim - 1) != 1 && t.stride(ndim - 2) != 1)
    fail(name, "has shape " + shape_of(t) + " and is contiguous in neither of its last two dimensions",
         "a stride of 1 in one of them");
}

void Check::output(const char* name, const TensorView& t, Shape shape, Dtypes dtypes) {
  common(name, t, shape, dtypes, 0);
  if (t.read_only) fail(name, "is read-only", "a writable tensor");
}

void Check::strided_output(const char* name, const TensorView& t, Shape shape, Dtypes dtypes) {
  common(name, t, shape, dtypes, -1);
  if (t.read_only) fail(name, "is read-only", "a writable tensor");
}

void* Check::workspace(const OptTensor& workspace, int64_t bytes) {
  const char* name = "workspace";
  int64_t has = 0;
  if (workspace) {
    memory(name, *workspace, 0);
    if (workspace->read_only) fail(name, "is read-only", "a writable tensor");
    has = workspace->numel() * workspace->dl.dtype.bits / 8;
  }
  if (has < bytes) fail(name, "has " + std::to_string(has) + " bytes", std::to_string(bytes) + " or more");
  if (bytes == 0) return nullptr;
  void* data = workspace->data<void>();
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) fail(name, "does not start on 16 bytes", "a tensor that does");
  return data;
}

void Check::range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    fail(name, "is " + std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
}

float Check::factor(const char* name, double value, double unit) {
  const auto f = static_cast<float>(value * unit);
  if (!(f >= FLT_MIN && f <= FLT_MAX)) fail(name, "is " + std::to_string(value), "a finite float32 above 0");
  return f;
}

void Check::packed(const char* name, const OptTensor& cu_seqlens, Dim& batch) {
  if (!cu_seqlens) return;
  Dim ends{"batch + 1", batch.value < 0 ? -1 : batch.value + 1};
  tensor(name, *cu_seqlens, {ends}, kInt32);
  range("batch + 1", ends, 1, std::numeric_limits<int32_t>::max());
  batch.value = ends - 1;
}

void Check::slots(const OptTensor& slots, Dim& batch, const Dim& num_slots) {
  if (slots) {
    tensor("slots", *slots, {batch}, kInt32);
  } else if (batch > num_slots) {
    fail("slots", "is None for batch=" + std::to_string(batch),
         "a tensor, or batch <= num_slots=" + std::to_string(num_slots));
  }
}

void Check::require_cpu() const {
  if (on_cuda()) fail(first_name_, "is on " + device_name(device()), "a cpu tensor");
}

void* Check::stream(const CallStream& call) const {
  if (call.given) return call.stream;
  void* stream = nullptr;
  if (first_.api != nullptr && first_.api->current_work_stream(kDLCUDA, first_.dl.device.device_id, &stream) != 0)
    throw CudaError(std::string(op_) + ": the tensor library could not name its current stream");
  return stream;
}

}  // namespace specdec
