// Binds the ops of csrc/layers. `specdec_kernels.ops` documents the arguments.
#include "layers/activation/silu_and_mul.h"
#include "layers/gemm/small_m_bmm.h"
#include "layers/gemm/small_m_gemm.h"
#include "layers/moe/moe_combine.h"
#include "layers/moe/moe_grouped_gemm.h"
#include "layers/moe/moe_route.h"
#include "layers/norm/add_rms_norm.h"
#include "layers/norm/gated_rms_norm.h"
#include "layers/norm/rms_norm_concat.h"
#include "layers/quant/dequantize.h"
#include "layers/quant/quantize_fp8.h"
#include "layers/rope/rope_qkv_write_kv.h"
#include "python/fast_op.h"
#include "python/module.h"

namespace specdec::python {

void add_layers(py::module_& m) {
  using namespace layers;
  def_op<&add_rms_norm>(m, "add_rms_norm", "stream x weight eps topk_weights residual out_sum out_scales out",
                        "apply RMSNorm to x or to x + residual");
  def_op<&rms_norm_concat>(
      m, "rms_norm_concat",
      "stream embeddings tokens embedding_weight features feature_rows feature_weight eps out out_features",
      "concatenate RMS-normalized embeddings and features (EAGLE-3 input)");
  def_op<&gated_rms_norm>(m, "gated_rms_norm", "stream x gate weight eps gates_first activation out",
                          "apply RMSNorm to groups of elements, and a gate");
  def_op<&silu_and_mul>(m, "silu_and_mul", "stream x out", "compute silu(gate) * up (SwiGLU)");
  def_op<&small_m_gemm>(m, "small_m_gemm", "stream x weight bias x_scales weight_scales gated plan out",
                        "multiply a few rows by a weight: GEMM for small M");
  def_op<&small_m_bmm>(m, "small_m_bmm", "stream x weight out",
                       "multiply a few rows of heads by the heads' weights: batched GEMM for small M");
  def_op<&small_m_gemm_plan>(m, "small_m_gemm_plan", "x weight gated",
                             "return the name of the fastest GEMM for these tensors");
  def_op<&small_m_gemm_plan_of_sizes>(m, "small_m_gemm_plan_of_sizes", "rows outs ins bits gated has_wgmma",
                                      "return the name of the fastest GEMM for these sizes");
  def_op<&moe_grouped_gemm>(m, "moe_grouped_gemm",
                            "stream x weight sorted_pairs expert_ends x_scales weight_scales shared_weight gated "
                            "routing_ready out",
                            "multiply rows by the weights of their experts: grouped GEMM");
  def_op<&moe_route>(m, "moe_route",
                     "stream scores top_k renormalize activation bias scale eps n_group topk_group num_shared "
                     "shared_gate out_topk_ids out_topk_weights out_sorted_pairs out_expert_ends",
                     "select top-k experts per row and sort (row, expert) pairs by expert");
  def_op<&moe_combine>(m, "moe_combine", "stream expert_outputs topk_weights out",
                       "sum each row's expert outputs, weighted by its routing weights");
  def_op<&quantize_fp8>(m, "quantize_fp8", "stream x group_size scale out out_scales",
                        "quantize rows to FP8 with scales");
  def_op<&dequantize>(m, "dequantize", "stream qweight scales out", "dequantize FP8 or INT4 weights");
  def_op<&rope_qkv_write_kv>(m, "rope_qkv_write_kv",
                             "stream qkv cos_sin positions k_pool v_pool page_table prefix_lens row_offset slots "
                             "num_valid cu_seqlens_q q_norm k_norm eps page_refs k_scale v_scale status out",
                             "apply q/k RMSNorm and RoPE, write keys and values to the KV cache");
}

}  // namespace specdec::python
