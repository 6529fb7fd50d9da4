// Binds the ops of csrc/draft. `specdec_kernels.ops` documents the arguments.
#include "draft/append_draft_backlog.h"
#include "draft/draft_extend_inputs.h"
#include "draft/expand_tree.h"
#include "draft/expand_trellis.h"
#include "draft/sample_draft.h"
#include "draft/select_topk.h"
#include "draft/update_calibration.h"
#include "python/fast_op.h"
#include "python/module.h"

namespace specdec::python {

void add_draft(py::module_& m) {
  using namespace draft;
  def_op<&select_topk>(m, "select_topk", "stream logits k id_map out_ids out_logprobs",
                       "compute log-softmax and top-k of each row of logits");
  def_op<&sample_draft>(m, "sample_draft",
                        "stream logits k seeds positions temperature slots id_map out_ids out_logprobs",
                        "sample without replacement from each row of draft logits");
  def_op<&expand_root>(
      m, "expand_root",
      "stream topk_ids topk_logprobs seq_lens num_steps slots position_offset calibration out_cand_tokens "
      "out_cand_parents out_cand_scores out_frontier out_tokens out_positions out_mask",
      "run draft step 1: the root's children become candidates and frontier");
  def_op<&expand_tree>(m, "expand_tree",
                       "stream topk_ids topk_logprobs step cand_tokens cand_parents cand_scores frontier mask seq_lens "
                       "slots position_offset calibration out_tokens out_parent_rows out_positions",
                       "run a later draft step: append children, keep the best k as the frontier");
  def_op<&expand_trellis>(
      m, "expand_trellis",
      "stream topk_ids topk_logprobs num_candidates predecessors successors gates root_tokens id_map calibration width "
      "out_tokens out_parents out_scores",
      "find the best nodes of the trellis that a block drafter yields");
  def_op<&update_calibration>(m, "update_calibration",
                              "stream table counts tokens parents positions num_nodes scores emitted num_valid",
                              "update the calibration of draft scores from which nodes were accepted");
  def_op<&draft_extend_inputs>(m, "draft_extend_inputs",
                               "stream tokens path num_valid prefix_lens num_nodes slots cu_seqlens_q position_offset "
                               "out_tokens out_positions out_node_rows out_last_rows out_kept_slots",
                               "build the inputs of draft-extend from a round's accepted tokens");
  def_op<&append_draft_backlog>(
      m, "append_draft_backlog",
      "stream tokens path num_valid backlog_lens backlog_tokens features backlog_features slots cu_seqlens_q",
      "buffer the inputs of draft-extend for slots whose draft is paused");
}

}  // namespace specdec::python
