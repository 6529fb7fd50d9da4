// verify_tree: walk each request's tree along the target's own choices; emit the accepted drafts and the bonus token.
//
// Reads the target's logits of the tree's nodes, the tree's links, and sampling parameters by slot (sampling.h). Writes
// tokens, their number and the path of nodes. Kernels: verify_tree.cu (node by node), verify_at_once.cu (all nodes at
// once), sampled_walk.cu (rejection sampling); verify_plan.h chooses.
#pragma once

#include "core/dispatch.h"
#include "core/packed_rows.h"
#include "verify/logit_row.h"
#include "verify/sampling.h"
#include "verify/tree_walk.h"
#include "verify/verify_plan.h"

namespace specdec::verify {

// The kernels keep the tree in smem.
constexpr int64_t kMaxVerifiedNodes = 512;
// The sum of this many weights fits 64 bits.
constexpr int64_t kMaxVocab = int64_t{1} << 22;
// A kernel keeps a bit per token if the draft has its own vocabulary.
constexpr int64_t kMaxMappedVocab = int64_t{1} << 20;

// Distributions from which sampled candidates were drawn.
struct SampledDrafts {
  const void* logits;  // [batch, num_rows, vocab] in the target's dtype, or null: no candidate was sampled
  int64_t batch_stride, row_stride, num_rows, vocab;
  const int32_t* rows;       // [batch, num_nodes]: the row of `logits` from which a node was drawn; -1: not sampled
  const float* temperature;  // [num_slots], or null: the request's own
  const int32_t* id_map;     // [vocab] or null: target id of each draft id
  bool block_verification;   // block verification of chains
};

struct VerifyTreeParams {
  const void* logits;  // [batch, num_nodes, vocab] or [num_rows, vocab], with the strides below, in elements
  Dtypes logits_dtype;
  int64_t logits_batch_stride, logits_node_stride;
  TreeLinks links;
  const int32_t* positions;   // [batch, num_nodes]: positions of the nodes' tokens; null if all requests are greedy
  const int32_t* tree_sizes;  // [batch]: nodes in use of each tree; <= 0: an empty row
  SamplingArrays sampling;
  SampledDrafts drafts;
  const int32_t* vocab_mask;  // as logits, [.., mask_words], or null: bitmask of the tokens allowed at each node
  const float* logit_bias;    // [num_slots, vocab] or null, with this stride between slots:
  int64_t bias_stride, mask_words;
  const int32_t* slots;         // [batch] or null
  const int32_t* cu_seqlens_q;  // [batch + 1] or null: node i of request b has the packed row cu_seqlens_q[b] + i
  int32_t* status;              // [num_slots] or null
  int32_t* out_tokens;          // [batch, accept_width]: accepted drafts, bonus token, then -1
  int32_t* out_len;             // [batch]
  int32_t* out_path;            // [batch, accept_width]: node of each emitted token's KV row; the last one repeats
  int64_t batch, vocab, accept_width;
  int64_t num_rows;  // batch * num_nodes, or the number of packed rows
  int64_t num_slots;
  uint64_t* workspace;  // [num_rows, plan.parts] or null
  VerifyPlan plan;      // on a GPU
};

// Return a node's row among all rows. Packed rows are read before their bounds are known: an index out of range is
// clamped to the nearest row.
SD_HD int64_t row_of_node(const VerifyTreeParams& p, int64_t b, int64_t node) {
  if (p.cu_seqlens_q) return clamp_to(p.cu_seqlens_q[b] + node, 0, p.num_rows - 1);
  return b * p.links.num_nodes + node;
}

// Return the nodes of row b to walk, at most its rows; set `bits` for the slot's status.
SD_HD int32_t walked_size(const VerifyTreeParams& p, int64_t b, int32_t& bits) {
  if (!p.cu_seqlens_q) return tree_size(p.tree_sizes[b], p.links.num_nodes, bits);
  const int64_t rows = packed_rows(p.cu_seqlens_q, b, p.num_rows).count;
  if (rows > 0) return tree_size(p.tree_sizes[b], rows < p.links.num_nodes ? rows : p.links.num_nodes, bits);
  if (p.tree_sizes[b] > 0) bits |= kBadTree;
  return 0;
}

template <class T>
SD_HD LogitRow<T> logit_row(const VerifyTreeParams& p, int64_t b, int64_t slot, int64_t node) {
  const int64_t start = p.cu_seqlens_q ? row_of_node(p, b, node) * p.logits_node_stride
                                       : b * p.logits_batch_stride + node * p.logits_node_stride;
  return {static_cast<const T*>(p.logits) + start, p.logit_bias ? p.logit_bias + slot * p.bias_stride : nullptr,
          p.vocab_mask ? p.vocab_mask + row_of_node(p, b, node) * p.mask_words : nullptr};
}

template <class T>
SD_HD LogitRow<T> draft_logit_row(const VerifyTreeParams& p, int64_t b, int64_t row) {
  return {static_cast<const T*>(p.drafts.logits) + b * p.drafts.batch_stride + row * p.drafts.row_stride, nullptr,
          nullptr};
}

// Return the absolute position of the token after node `node`, which keys its noise.
SD_HD uint32_t position_after(const VerifyTreeParams& p, int64_t b, int64_t node) {
  return static_cast<uint32_t>(p.positions[b * p.links.num_nodes + node]) + 1;
}

SD_HD EmittedRow emitted_row(const VerifyTreeParams& p, int64_t b) {
  return {p.out_tokens + b * p.accept_width, p.out_path + b * p.accept_width, p.accept_width};
}
// Finish a walk. Called by the thread that writes.
SD_HD void finish_walk(const VerifyTreeParams& p, int64_t b, int64_t slot, int32_t bits, EmittedRow& out) {
  if (bits) set_status(p.status, slot, bits);
  out.finish();
  p.out_len[b] = static_cast<int32_t>(out.len);
}

// Call f.template operator()<T, kAdjusted, kSampled>() for a call's dtype and features.
template <class F>
void with_kernel_variant(const VerifyTreeParams& p, F&& f) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    const bool adjusted = p.logit_bias || p.vocab_mask, sampled = p.sampling.temperature;
    if (adjusted)
      sampled ? f.template operator()<T, true, true>() : f.template operator()<T, true, false>();
    else
      sampled ? f.template operator()<T, false, true>() : f.template operator()<T, false, false>();
  });
}

void verify_tree(CallStream stream, const TensorView& logits, const TensorView& tokens, const TensorView& parents,
                 const TensorView& positions, const TensorView& first_child, const TensorView& next_sibling,
                 const TensorView& num_nodes, int64_t accept_width, const OptTensor& slots,
                 const OptTensor& cu_seqlens_q, const OptTensor& temperature, const OptTensor& top_k,
                 const OptTensor& top_p, const OptTensor& min_p, const OptTensor& seeds, const OptTensor& vocab_mask,
                 const OptTensor& logit_bias, const OptTensor& draft_logits, const OptTensor& draft_rows,
                 const OptTensor& draft_temperature, const OptTensor& id_map, bool block_verification,
                 const std::optional<std::string>& plan, const OptTensor& workspace, const OptTensor& status,
                 const TensorView& out_tokens, const TensorView& out_len, const TensorView& out_path);

// Return the bytes of workspace that a call needs, and the name of its plan ("cpu" on the CPU).
int64_t verify_tree_workspace(const TensorView& logits, std::optional<int64_t> num_nodes, const OptTensor& temperature,
                              const OptTensor& draft_logits, const std::optional<std::string>& plan);
std::string verify_tree_plan(const TensorView& logits, std::optional<int64_t> num_nodes, const OptTensor& temperature,
                             const OptTensor& draft_logits, const std::optional<std::string>& plan);

void verify_tree_cpu(const VerifyTreeParams& p);
void verify_tree_cuda(const VerifyTreeParams& p, Stream stream);
void verify_at_once_cuda(const VerifyTreeParams& p, Stream stream);
// Verify sampled candidates (sampled_walk.h).
void verify_sampled_cpu(const VerifyTreeParams& p);
void verify_sampled_cuda(const VerifyTreeParams& p, Stream stream);

}  // namespace specdec::verify
