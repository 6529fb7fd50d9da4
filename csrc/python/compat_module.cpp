// Binds the ops of csrc/compat under the names that SGLang calls them by. `specdec_kernels.compat` documents them.
#include "compat/linked_trees.h"
#include "compat/move_accept_tokens.h"
#include "compat/verify_links.h"
#include "python/fast_op.h"
#include "python/module.h"

namespace specdec::python {

void add_compat(py::module_& m) {
  using namespace compat;
  def_op<&build_tree_kernel_efficient>(
      m, "build_tree_kernel_efficient",
      "stream parent_list selected_index verified_seq_len tree_mask positions retrive_index retrive_next_token "
      "retrive_next_sibling topk depth draft_token_num tree_mask_mode",
      "build SGLang's tree from chosen candidates");
  def_op<&verify_tree_greedy>(m, "verify_tree_greedy",
                              "stream predicts accept_index accept_token_num candidates retrive_index "
                              "retrive_next_token retrive_next_sibling target_predict",
                              "verify SGLang's tree greedily");
  def_op<&tree_speculative_sampling_target_only>(
      m, "tree_speculative_sampling_target_only",
      "stream predicts accept_index accept_token_num candidates retrive_index retrive_next_token retrive_next_sibling "
      "uniform_samples uniform_samples_for_final_sampling target_probs draft_probs threshold_single threshold_acc",
      "verify SGLang's tree by sampling");
  def_op<&move_accept_tokens>(m, "move_accept_tokens",
                              "stream data_ptrs row_bytes num_rows req_to_token req_pool_indices seq_lens "
                              "out_cache_loc accept_index num_correct_drafts",
                              "compact the KV rows of accepted paths in SGLang's pool");
}

}  // namespace specdec::python
