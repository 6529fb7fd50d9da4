// Binds the ops of csrc/parallel. `specdec_kernels.parallel.symmetric` documents the arguments.
#include "parallel/all_reduce.h"
#include "python/fast_op.h"
#include "python/module.h"

namespace specdec::python {

void add_parallel(py::module_& m) {
  using namespace parallel;
  def_op<&all_reduce>(m, "all_reduce", "stream x buffers state rank capacity timeout out", "sum rows over the ranks");
  def_op<&all_gather>(m, "all_gather", "stream x buffers state rank capacity timeout out",
                      "join the ranks' columns of rows");
  def_op<&all_reduce_add_rms_norm>(m, "all_reduce_add_rms_norm",
                                   "stream x buffers state rank capacity timeout weight eps residual out_sum out",
                                   "sum rows over the ranks, and apply RMSNorm to the sum or to the sum + residual");
}

}  // namespace specdec::python
