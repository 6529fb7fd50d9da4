// Binds the ops of csrc/tree. `specdec_kernels.ops` documents the arguments.
#include "python/fast_op.h"
#include "python/module.h"
#include "tree/allocate_nodes.h"
#include "tree/build_tree.h"
#include "tree/build_tree_from_mask.h"
#include "tree/build_tree_from_parents.h"
#include "tree/merge_trees.h"
#include "tree/pack_trees.h"

namespace specdec::python {

void add_tree(py::module_& m) {
  using namespace tree;
  def_op<&build_tree>(
      m, "build_tree",
      "stream cand_tokens cand_parents cand_scores root_tokens seq_lens num_nodes slots order status out_tokens "
      "out_parents out_positions out_first_child out_next_sibling out_mask out_num_nodes out_scores",
      "build a tree of the best candidates, with links, mask and positions");
  def_op<&build_tree_from_parents>(m, "build_tree_from_parents",
                                   "stream tokens parents seq_lens num_nodes slots status out_tokens out_parents "
                                   "out_positions out_first_child out_next_sibling out_mask out_num_nodes",
                                   "build links, mask and positions from parent pointers");
  def_op<&build_tree_from_mask>(m, "build_tree_from_mask",
                                "stream tokens mask seq_lens num_nodes slots status out_tokens out_parents "
                                "out_positions out_first_child out_next_sibling out_mask out_num_nodes",
                                "build links, mask and positions from an ancestor mask");
  def_op<&merge_trees>(m, "merge_trees",
                       "stream a_tokens a_parents a_positions a_num_nodes a_scores b_tokens b_parents b_positions "
                       "b_num_nodes b_scores num_nodes out_tokens out_parents out_positions out_first_child "
                       "out_next_sibling out_mask out_num_nodes out_scores",
                       "merge two draft trees and keep the best nodes");
  def_op<&allocate_nodes>(m, "allocate_nodes",
                          "stream scores budget slots max_nodes finish_reasons status budget_levels level_limits "
                          "out_num_nodes out_cu_seqlens out_expected out_cuts",
                          "distribute a verify budget for the whole batch among requests");
  def_op<&pack_trees>(m, "pack_trees",
                      "stream tokens parents positions first_child next_sibling mask num_nodes scores kept cu_seqlens "
                      "num_rows out_tokens out_positions out_mask out_scores",
                      "cut trees to their first nodes and pack these rows");
}

}  // namespace specdec::python
