// Binds the ops of csrc/recurrent. `specdec_kernels.ops` documents the arguments.
#include "python/fast_op.h"
#include "python/module.h"
#include "recurrent/compute_gates.h"
#include "recurrent/set_pending_paths.h"
#include "recurrent/tree_conv1d.h"
#include "recurrent/tree_recurrence.h"

namespace specdec::python {

void add_recurrent(py::module_& m) {
  using namespace recurrent;
  def_op<&set_pending_paths>(m, "set_pending_paths", "stream nodes num_nodes parity path num_valid slots status",
                             "make accepted paths pending, to be folded into recurrent state by the next pass");
  def_op<&compute_gates>(m, "compute_gates", "stream a b decay dt_bias dt_min dt_max g beta",
                         "compute the decays and betas of a recurrence");
  def_op<&tree_recurrence>(m, "tree_recurrence",
                           "stream q k v g beta state records_k records_u records_g nodes num_nodes parity prefix_lens "
                           "cu_seqlens mask slots scale l2norm_eps delta_rule out status",
                           "run a linear recurrence over all paths of a tree, from one committed state");
  def_op<&commit_recurrence>(m, "commit_recurrence",
                             "stream state records_k records_u records_g nodes num_nodes parity slots status",
                             "fold the pending paths into the recurrent state of a layer");
  def_op<&tree_conv1d>(m, "tree_conv1d",
                       "stream x weight bias window records nodes num_nodes parity prefix_lens cu_seqlens mask slots "
                       "activation out status",
                       "run a causal depthwise convolution over all paths of a tree");
  def_op<&commit_conv1d>(m, "commit_conv1d", "stream window records nodes num_nodes parity slots status",
                         "fold the pending paths into the convolution windows of a layer");
}

}  // namespace specdec::python
