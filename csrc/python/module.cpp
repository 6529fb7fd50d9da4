// The Python module: one line for each op. `ops.py` documents the arguments.
#include "python/module.h"

#include "core/errors.h"
#include "python/fast_op.h"

// --- draft
#include "draft/append_draft_backlog.h"
#include "draft/draft_extend_inputs.h"
#include "draft/expand_tree.h"
#include "draft/sample_draft.h"
#include "draft/select_topk.h"
#include "draft/update_calibration.h"
// --- tree
#include "tree/allocate_nodes.h"
#include "tree/build_tree.h"
#include "tree/build_tree_from_mask.h"
#include "tree/build_tree_from_parents.h"
#include "tree/merge_trees.h"
#include "tree/pack_trees.h"
// --- layers
#include "layers/activation/silu_and_mul.h"
#include "layers/gemm/small_m_gemm.h"
#include "layers/moe/moe_combine.h"
#include "layers/moe/moe_grouped_gemm.h"
#include "layers/moe/moe_route.h"
#include "layers/norm/add_rms_norm.h"
#include "layers/norm/rms_norm_concat.h"
#include "layers/quant/dequantize.h"
#include "layers/quant/quantize_fp8.h"
#include "layers/rope/rope_qkv_write_kv.h"
// --- attention
#include "attention/tree_attention.h"
// --- verify
#include "verify/commit_tokens.h"
#include "verify/edit_logits.h"
#include "verify/mask_stops.h"
#include "verify/score_tokens.h"
#include "verify/verify_tree.h"
// --- kv
#include "kv/alloc_pages.h"
#include "kv/assign_pages.h"
#include "kv/copy_kv.h"
#include "kv/fork_pages.h"
#include "kv/free_pages.h"
#include "kv/move_kv.h"
#include "kv/write_kv.h"
// --- round
#include "round/apply_commands.h"
#include "round/publish_results.h"
// --- compat
#include "compat/linked_trees.h"
#include "compat/move_accept_tokens.h"
#include "compat/verify_chains.h"
#include "compat/verify_links.h"

namespace specdec::python {
namespace {

template <class Error>
void raise_as(PyObject* type) {
  static PyObject* python_type;
  python_type = type;
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& e) {
      PyErr_SetString(python_type, e.what());
    }
  });
}

// What `specdec bench call_overhead` times: the boundary alone.
template <class... Tensors>
int64_t noop(CallStream, const Tensors&... tensors) {
  return (tensors.ndim() + ...);
}

}  // namespace
}  // namespace specdec::python

PYBIND11_MODULE(_C_of_main_interpreter, m, pybind11::mod_gil_not_used()) {
  using namespace specdec;
  using namespace specdec::python;
  // The rooms that the ops below come from.
  using namespace draft;
  using namespace tree;
  using namespace layers;
  using namespace attention;
  using namespace verify;
  using namespace kv;
  using namespace round;
  using namespace compat;
  raise_as<TypeError>(PyExc_TypeError);
  raise_as<ValueError>(PyExc_ValueError);
  raise_as<NotImplementedError>(PyExc_NotImplementedError);
  raise_as<CudaError>(PyExc_RuntimeError);

  // atexit runs before Python begins to end.
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(&keep_other_threads_out));

  m.attr("version") = SPECDEC_VERSION;
#ifdef SPECDEC_WITH_CUDA
  m.attr("cuda_version") = SPECDEC_CUDA_VERSION;
  m.attr("cuda_architectures") = SPECDEC_CUDA_ARCHITECTURES;
#else
  m.attr("cuda_version") = pybind11::none();
  m.attr("cuda_architectures") = pybind11::none();
#endif

  // --- draft
  def_op<&select_topk>(m, "select_topk", "log-softmax and top-k of each row of logits");
  def_op<&sample_draft>(m, "sample_draft", "draws without replacement from each row of draft logits");
  def_op<&expand_root>(m, "expand_root", "draft step 1: the root's children become candidates and frontier");
  def_op<&expand_tree>(m, "expand_tree", "a later draft step: append children, keep the best k as the frontier");
  def_op<&update_calibration>(m, "update_calibration", "what became of nodes moves how a draft's scores are put right");
  def_op<&draft_extend_inputs>(m, "draft_extend_inputs", "the rows of draft-extend, from what a round accepted");
  def_op<&append_draft_backlog>(m, "append_draft_backlog", "what draft-extend would have read, kept for later");

  // --- tree
  def_op<&build_tree>(m, "build_tree", "the best candidates as a tree with links, mask and positions");
  def_op<&build_tree_from_parents>(m, "build_tree_from_parents", "links, mask and positions from parent pointers");
  def_op<&build_tree_from_mask>(m, "build_tree_from_mask", "links, mask and positions from an ancestor mask");
  def_op<&merge_trees>(m, "merge_trees", "the union of two draft trees, cut to its best nodes");
  def_op<&allocate_nodes>(m, "allocate_nodes", "how many nodes each request gets of a budget for the whole batch");
  def_op<&pack_trees>(m, "pack_trees", "trees cut to their first nodes, and these as packed rows");

  // --- layers
  def_op<&add_rms_norm>(m, "add_rms_norm", "rows, or sums of rows, over their root mean square");
  def_op<&rms_norm_concat>(m, "rms_norm_concat", "embeddings beside features, each row over its root mean square");
  def_op<&silu_and_mul>(m, "silu_and_mul", "silu(gate) * up of rows that hold both");
  def_op<&small_m_gemm>(m, "small_m_gemm", "a few rows times a weight");
  def_op<&small_m_gemm_plan>(m, "small_m_gemm_plan", "who multiplies such rows by a weight quickest");
  def_op<&small_m_gemm_plan_of_sizes>(m, "small_m_gemm_plan_of_sizes",
                                      "the same of sizes, without tensors or a device");
  def_op<&moe_grouped_gemm>(m, "moe_grouped_gemm", "rows times the weights of the experts that they take");
  def_op<&moe_route>(m, "moe_route", "which experts rows take, and the pairs of both by experts");
  def_op<&moe_combine>(m, "moe_combine", "the sums of what rows' experts made, by their shares");
  def_op<&quantize_fp8>(m, "quantize_fp8", "rows as numbers of 8 bits and their scales");
  def_op<&dequantize>(m, "dequantize", "numbers of 8 or 4 bits as those they stand for");
  def_op<&rope_qkv_write_kv>(m, "rope_qkv_write_kv",
                             "normalise and rotate query and key heads, write keys and values to pages");

  // --- attention
  def_op<&tree_attention>(m, "tree_attention", "attention over a paged KV prefix and a tail of tree nodes");
  def_op<&tree_attention_workspace>(m, "tree_attention_workspace",
                                    "bytes of workspace that a tree_attention call needs");
  def_op<&tree_attention_plan>(m, "tree_attention_plan", "which plan a tree_attention call runs");
  add_attention_plans(m);

  // --- verify
  def_op<&verify_tree>(m, "verify_tree", "accepted drafts and bonus token, straight from the target's logits");
  def_op<&verify_tree_workspace>(m, "verify_tree_workspace", "bytes of workspace that a verify_tree call needs");
  def_op<&verify_tree_plan>(m, "verify_tree_plan", "which kernel a verify_tree call runs");
  def_op<&verify_plan>(m, "verify_plan", "the same of sizes, without tensors or a device");
  def_op<&edit_logits>(m, "edit_logits", "biases, penalties and masks that requests ask of their logits");
  def_op<&mask_stops>(m, "mask_stops", "no stop tokens where it is too early for them");
  def_op<&score_tokens>(m, "score_tokens", "log-probabilities of emitted tokens and of the best alternatives");
  def_op<&commit_tokens>(m, "commit_tokens", "cut emitted tokens at stop tokens and limits, advance the slots");

  // --- kv
  def_op<&alloc_pages>(m, "alloc_pages", "top page tables up to the rows about to be written");
  def_op<&free_pages>(m, "free_pages", "take back the pages beyond the rows that slots keep");
  def_op<&fork_pages>(m, "fork_pages", "give empty slots the first rows of other slots, by reference");
  def_op<&assign_pages>(m, "assign_pages", "make entries of the page table name the pages of others");
  def_op<&write_kv>(m, "write_kv", "scatter the valid rows of new K and V into the slots' pages");
  def_op<&move_kv>(m, "move_kv", "bring the KV rows of an accepted path together, in every layer");
  def_op<&copy_kv>(m, "copy_kv", "copy rows of one slot to the same rows of another, in every layer");

  // --- round
  def_op<&apply_commands>(m, "apply_commands", "the host's next record of commands becomes slot state");
  def_op<&publish_results>(m, "publish_results", "what a round did, as the next record of the host's ring");

  // --- compat: under the names that other engines call them by
  def_op<&build_tree_kernel_efficient>(m, "build_tree_kernel_efficient", "SGLang's tree from chosen candidates");
  def_op<&reconstruct_indices_from_tree_mask>(m, "reconstruct_indices_from_tree_mask", "SGLang's links from a mask");
  def_op<&verify_tree_greedy>(m, "verify_tree_greedy", "SGLang's walk along the target's argmax");
  def_op<&tree_speculative_sampling_target_only>(m, "tree_speculative_sampling_target_only", "SGLang's sampled walk");
  def_op<&move_accept_tokens>(m, "move_accept_tokens", "KV rows of accepted paths come together in SGLang's pool");
  def_op<&chain_speculative_sampling>(m, "chain_speculative_sampling", "SGLang's rejection sampling of chains");
  def_op<&rejection_sample>(m, "rejection_sample", "vLLM's rejection sampling of ragged chains");

  add_ngram_index(m);
  add_scheduler(m);

  // --- calls that do nothing
  using T = TensorView;
  def_op<&noop<T>>(m, "noop1", "takes one tensor");
  def_op<&noop<T, T, T, T>>(m, "noop4", "takes four tensors");
  def_op<&noop<T, T, T, T, T, T, T, T>>(m, "noop8", "takes eight tensors");
}

// pybind11 hangs in other interpreters before Python 3.12, and so would what takes the GIL from threads of our own.
extern "C" PYBIND11_EXPORT PyObject* PyInit__C() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit__C_of_main_interpreter();
  PyErr_SetString(PyExc_ImportError, "specdec_kernels._C is imported in a second interpreter, expected the main one");
  return nullptr;
}
