#include "python/fast_op.h"

namespace specdec::python {

std::string argument_name(const char* op, size_t i) {
  try {
    return py::module_::import("specdec_kernels.ops._op_list").attr("argument_name")(op, i).cast<std::string>();
  } catch (const std::exception&) {
    return "argument " + std::to_string(i);
  }
}

}  // namespace specdec::python
