// The Python module: one line per op. Python's `ops` documents the arguments.
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

// Do nothing; `specdec bench call_overhead` times the language boundary with it.
template <class... Tensors>
int64_t noop(CallStream, const Tensors&... tensors) {
  return (tensors.ndim() + ...);
}

}  // namespace
}  // namespace specdec::python

PYBIND11_MODULE(_C_of_main_interpreter, m, pybind11::mod_gil_not_used()) {
  using namespace specdec;
  using namespace specdec::python;
  // The namespaces of the ops below.
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

  // atexit runs before interpreter shutdown.
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(&block_other_threads));

  m.attr("version") = SPECDEC_VERSION;
#ifdef SPECDEC_WITH_CUDA
  m.attr("cuda_version") = SPECDEC_CUDA_VERSION;
  m.attr("cuda_architectures") = SPECDEC_CUDA_ARCHITECTURES;
#else
  m.attr("cuda_version") = pybind11::none();
  m.attr("cuda_architectures") = pybind11::none();
#endif

  // --- draft
  def_op<&select_topk>(m, "select_topk", "compute log-softmax and top-k of each row of logits");
  def_op<&sample_draft>(m, "sample_draft", "sample without replacement from each row of draft logits");
  def_op<&expand_root>(m, "expand_root", "run draft step 1: the root's children become candidates and frontier");
  def_op<&expand_tree>(m, "expand_tree", "run a later draft step: append children, keep the best k as the frontier");
  def_op<&update_calibration>(m, "update_calibration",
                              "update the calibration of draft scores from which nodes were accepted");
  def_op<&draft_extend_inputs>(m, "draft_extend_inputs",
                               "build the inputs of draft-extend from a round's accepted tokens");
  def_op<&append_draft_backlog>(m, "append_draft_backlog",
                                "buffer the inputs of draft-extend for slots whose draft is paused");

  // --- tree
  def_op<&build_tree>(m, "build_tree", "build a tree of the best candidates, with links, mask and positions");
  def_op<&build_tree_from_parents>(m, "build_tree_from_parents",
                                   "build links, mask and positions from parent pointers");
  def_op<&build_tree_from_mask>(m, "build_tree_from_mask", "build links, mask and positions from an ancestor mask");
  def_op<&merge_trees>(m, "merge_trees", "merge two draft trees and keep the best nodes");
  def_op<&allocate_nodes>(m, "allocate_nodes", "distribute a verify budget for the whole batch among requests");
  def_op<&pack_trees>(m, "pack_trees", "cut trees to their first nodes and pack these rows");

  // --- layers
  def_op<&add_rms_norm>(m, "add_rms_norm", "apply RMSNorm to x or to x + residual");
  def_op<&rms_norm_concat>(m, "rms_norm_concat", "concatenate RMS-normalized embeddings and features (EAGLE-3 input)");
  def_op<&silu_and_mul>(m, "silu_and_mul", "compute silu(gate) * up (SwiGLU)");
  def_op<&small_m_gemm>(m, "small_m_gemm", "multiply a few rows by a weight: GEMM for small M");
  def_op<&small_m_gemm_plan>(m, "small_m_gemm_plan", "return the name of the fastest GEMM for these tensors");
  def_op<&small_m_gemm_plan_of_sizes>(m, "small_m_gemm_plan_of_sizes",
                                      "return the name of the fastest GEMM for these sizes");
  def_op<&moe_grouped_gemm>(m, "moe_grouped_gemm", "multiply rows by the weights of their experts: grouped GEMM");
  def_op<&moe_route>(m, "moe_route", "select top-k experts per row and sort (row, expert) pairs by expert");
  def_op<&moe_combine>(m, "moe_combine", "sum each row's expert outputs, weighted by its routing weights");
  def_op<&quantize_fp8>(m, "quantize_fp8", "quantize rows to FP8 with scales");
  def_op<&dequantize>(m, "dequantize", "dequantize FP8 or INT4 weights");
  def_op<&rope_qkv_write_kv>(m, "rope_qkv_write_kv",
                             "apply q/k RMSNorm and RoPE, write keys and values to the KV cache");

  // --- attention
  def_op<&tree_attention>(m, "tree_attention", "compute attention over a paged KV prefix and a tail of tree nodes");
  def_op<&tree_attention_workspace>(m, "tree_attention_workspace",
                                    "return the bytes of workspace that a tree_attention call needs");
  def_op<&tree_attention_plan>(m, "tree_attention_plan", "return the plan that a tree_attention call runs");
  add_attention_plans(m);

  // --- verify
  def_op<&verify_tree>(m, "verify_tree", "verify a tree against the target's logits: accepted tokens and bonus token");
  def_op<&verify_tree_workspace>(m, "verify_tree_workspace",
                                 "return the bytes of workspace that a verify_tree call needs");
  def_op<&verify_tree_plan>(m, "verify_tree_plan", "return the kernel that a verify_tree call runs");
  def_op<&verify_plan>(m, "verify_plan", "return the kernel of a verify_tree call of these sizes");
  def_op<&edit_logits>(m, "edit_logits", "apply requests' biases, penalties and masks to logits");
  def_op<&mask_stops>(m, "mask_stops", "mask stop tokens where a request must not stop yet");
  def_op<&score_tokens>(m, "score_tokens", "compute log-probabilities of emitted tokens and of the top alternatives");
  def_op<&commit_tokens>(m, "commit_tokens", "cut emitted tokens at stop tokens and limits, advance the slots");

  // --- kv
  def_op<&alloc_pages>(m, "alloc_pages", "allocate pages for the rows about to be written");
  def_op<&free_pages>(m, "free_pages", "free the pages after the rows that slots keep");
  def_op<&fork_pages>(m, "fork_pages", "give empty slots a prefix of other slots, sharing full pages");
  def_op<&assign_pages>(m, "assign_pages", "copy page-table entries with reference counting");
  def_op<&write_kv>(m, "write_kv", "write the valid rows of new K and V to the slots' pages");
  def_op<&move_kv>(m, "move_kv", "compact the KV rows of an accepted path, in every layer");
  def_op<&copy_kv>(m, "copy_kv", "copy rows of one slot to the same rows of another, in every layer");

  // --- round
  def_op<&apply_commands>(m, "apply_commands", "apply the host's next record of commands to slot state");
  def_op<&publish_results>(m, "publish_results", "publish a round's results as the next record of the host's ring");

  // --- compat: under the names that other engines use
  def_op<&build_tree_kernel_efficient>(m, "build_tree_kernel_efficient", "build SGLang's tree from chosen candidates");
  def_op<&verify_tree_greedy>(m, "verify_tree_greedy", "verify SGLang's tree greedily");
  def_op<&tree_speculative_sampling_target_only>(m, "tree_speculative_sampling_target_only",
                                                 "verify SGLang's tree by sampling");
  def_op<&move_accept_tokens>(m, "move_accept_tokens", "compact the KV rows of accepted paths in SGLang's pool");

  add_ngram_index(m);
  add_scheduler(m);

  // --- calls that do nothing
  using T = TensorView;
  def_op<&noop<T>>(m, "noop1", "take one tensor and do nothing");
  def_op<&noop<T, T, T, T>>(m, "noop4", "take four tensors and do nothing");
  def_op<&noop<T, T, T, T, T, T, T, T>>(m, "noop8", "take eight tensors and do nothing");
}

// Refuse subinterpreters: pybind11 hangs there before Python 3.12, and so would our threads that acquire the GIL.
extern "C" PYBIND11_EXPORT PyObject* PyInit__C() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit__C_of_main_interpreter();
  PyErr_SetString(PyExc_ImportError, "specdec_kernels._C is imported in a second interpreter, expected the main one");
  return nullptr;
}
