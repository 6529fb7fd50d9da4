// Binds the ops of csrc/round. They are private to the engine.
#include "python/fast_op.h"
#include "python/module.h"
#include "round/apply_commands.h"
#include "round/publish_results.h"

namespace specdec::python {

void add_round(py::module_& m) {
  using namespace round;
  def_op<&apply_commands>(
      m, "apply_commands",
      "stream commands num_applied started_at seq_lens root_tokens remaining stop_tokens temperature top_k top_p min_p "
      "seeds stops_from num_logprobs max_nodes finish_reasons status out_slots out_given_back",
      "apply the host's next record of commands to slot state");
  def_op<&publish_results>(
      m, "publish_results",
      "stream results num_published started_at tokens num_valid num_nodes finish_reasons status slots logprobs top_ids "
      "top_logprobs num_logprobs path level_limits node_scores cuts max_nodes",
      "publish a round's results as the next record of the host's ring");
}

}  // namespace specdec::python
