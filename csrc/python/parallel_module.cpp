// Binds the ops of csrc/parallel, and the memory that they exchange rows through. `specdec_kernels.parallel.symmetric`
// documents the arguments.
#include "parallel/all_reduce.h"
#include "parallel/peer_memory.h"
#include "python/fast_op.h"
#include "python/module.h"

namespace specdec::python {

void add_parallel(py::module_& m) {
  using namespace parallel;
  using namespace py::literals;
  py::class_<PeerMemory>(m, "PeerMemory", "memory of a GPU that processes with other GPUs of the host map")
      .def(py::init<int, int64_t, uint32_t>(), "device"_a, "words"_a, "value"_a)
      .def_static(
          "open", [](int device, std::string_view handle) { return std::make_unique<PeerMemory>(device, handle); },
          "device"_a, "handle"_a)
      .def("close", &PeerMemory::close)
      .def_property_readonly("handle", [](const PeerMemory& memory) { return py::bytes(memory.handle()); })
      .def_property_readonly("address", &PeerMemory::address);
  def_op<&all_reduce>(m, "all_reduce", "stream x buffers state rank capacity timeout out", "sum rows over the ranks");
  def_op<&all_gather>(m, "all_gather", "stream x buffers state rank capacity timeout out",
                      "join the ranks' columns of rows");
  def_op<&all_reduce_add_rms_norm>(m, "all_reduce_add_rms_norm",
                                   "stream x buffers state rank capacity timeout weight eps residual out_sum out",
                                   "sum rows over the ranks, and apply RMSNorm to the sum or to the sum + residual");
}

}  // namespace specdec::python
