// Binds the ops of csrc/verify. `specdec_kernels.ops` documents the arguments.
#include "python/fast_op.h"
#include "python/module.h"
#include "verify/commit_tokens.h"
#include "verify/edit_logits.h"
#include "verify/mask_stops.h"
#include "verify/score_tokens.h"
#include "verify/verify_tree.h"

namespace specdec::python {

void add_verify(py::module_& m) {
  using namespace verify;
  def_op<&verify_tree>(
      m, "verify_tree",
      "stream logits tokens parents positions first_child next_sibling num_nodes accept_width slots cu_seqlens_q "
      "temperature top_k top_p min_p seeds vocab_mask logit_bias draft_logits draft_rows draft_temperature id_map "
      "block_verification plan workspace status out_tokens out_num_valid out_path",
      "verify a tree against the target's logits: accepted tokens and bonus token");
  def_op<&verify_tree_workspace>(m, "verify_tree_workspace", "logits num_nodes temperature draft_logits plan",
                                 "return the bytes of workspace that a verify_tree call needs");
  def_op<&verify_tree_plan>(m, "verify_tree_plan", "logits num_nodes temperature draft_logits plan",
                            "return the kernel that a verify_tree call runs");
  def_op<&verify_plan>(m, "verify_plan", "batch num_nodes vocab logit_bytes sampled rejects num_sms is_hopper_or_later",
                       "return the kernel of a verify_tree call of these sizes");
  def_op<&edit_logits>(
      m, "edit_logits",
      "stream logits mask tokens kinds bias counts presence frequency repetition vocab_mask slots cu_seqlens_q",
      "apply requests' biases, penalties and masks to logits");
  def_op<&mask_stops>(m, "mask_stops", "stream logits positions stop_tokens stops_from slots cu_seqlens_q",
                      "mask stop tokens where a request must not stop yet");
  def_op<&score_tokens>(m, "score_tokens",
                        "stream logits path tokens num_valid top_n slots num_logprobs cu_seqlens_q out_logprobs "
                        "out_top_ids out_top_logprobs",
                        "compute log-probabilities of emitted tokens and of the top alternatives");
  def_op<&commit_tokens>(m, "commit_tokens",
                         "stream tokens num_valid stop_tokens remaining max_seq_lens seq_lens prefix_lens root_tokens "
                         "finish_reasons slots status counts out",
                         "cut emitted tokens at stop tokens and limits, advance the slots");
}

}  // namespace specdec::python
