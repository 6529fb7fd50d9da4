// verify_tree: walks each request's tree along the target's own choices and emits the accepted drafts and the bonus.
#pragma once

#include "core/dispatch.h"
#include "core/packed_rows.h"
#include "verify/logit_row.h"
#include "verify/sampling.h"
#include "verify/tree_walk.h"
#include "verify/verify_plan.h"

namespace specdec::verify {

// A kernel keeps the tree in shared memory.
constexpr int64_t kMaxVerifiedNodes = 512;
// The sum of so many weights fits 64 bits.
constexpr int64_t kMaxVocab = int64_t{1} << 22;
// A kernel keeps a bit for each token, where the draft has a vocabulary of its own.
constexpr int64_t kMaxMappedVocab = int64_t{1} << 20;

// What sampled candidates were drawn from.
struct SampledDrafts {
  const void* logits;  // [batch, num_rows, vocab] in the target's dtype, or null: no candidate was sampled
  int64_t batch_stride, row_stride, num_rows, vocab;
  const int32_t* rows;       // [batch, num_nodes]: the row of `logits` a node was drawn from; -1: it was not sampled
  const float* temperature;  // [num_slots], or null: the request's
  const int32_t* id_map;     // [vocab] or null: the target's id of each of the draft's
  bool in_blocks;            // block verification
};

struct VerifyTreeParams {
  const void* logits;  // [batch, num_nodes, vocab] or [num_rows, vocab]; requests and nodes this many elements apart:
  Dtypes logits_dtype;
  int64_t logits_batch_stride, logits_node_stride;
  TreeLinks links;
  const int32_t* positions;   // [batch, num_nodes]: of the nodes' tokens; null when all is greedy
  const int32_t* tree_sizes;  // [batch]: nodes in use of each tree; <= 0 is an empty row
  SamplingArrays sampling;
  SampledDrafts drafts;
  const int32_t* vocab_mask;  // as logits, [.., mask_words], or null: bit patterns of the tokens allowed at each node
  const float* logit_bias;    // [num_slots, vocab] or null; slots `bias_stride` elements apart
  int64_t bias_stride, mask_words;
  const int32_t* slots;         // [batch] or null
  const int32_t* cu_seqlens_q;  // [batch + 1] or null: node i of request b has the packed row cu_seqlens_q[b] + i
  int32_t* status;              // [num_slots] or null
  int32_t* out_tokens;          // [batch, accept_width]: accepted drafts, bonus, -1
  int32_t* out_len;             // [batch]
  int32_t* out_path;            // [batch, accept_width]: node of each emitted token's KV row, the last one repeated
  int64_t batch, vocab, accept_width;
  int64_t num_rows;  // batch * num_nodes, or the packed ones
  int64_t num_slots;
  uint64_t* workspace;  // [num_rows, plan.parts] or null
  VerifyPlan plan;      // on a GPU
};

// The row of a node among those of all. Packed rows are read before it is known which there are: one that is not there
// counts as the nearest.
SD_HD int64_t row_of_node(const VerifyTreeParams& p, int64_t b, int64_t node) {
  if (p.cu_seqlens_q) return clamp_to(p.cu_seqlens_q[b] + node, 0, p.num_rows - 1);
  return b * p.links.num_nodes + node;
}

// Nodes of row b that are walked: no more than it has rows. `bits` is for the slot's status.
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

// Absolute position of the token that follows node `node`: what its noise is keyed by.
SD_HD uint32_t position_after(const VerifyTreeParams& p, int64_t b, int64_t node) {
  return static_cast<uint32_t>(p.positions[b * p.links.num_nodes + node]) + 1;
}

SD_HD EmittedRow emitted_row(const VerifyTreeParams& p, int64_t b) {
  return {p.out_tokens + b * p.accept_width, p.out_path + b * p.accept_width, p.accept_width};
}
// Called at the end of a walk, by the thread that writes.
SD_HD void finish_walk(const VerifyTreeParams& p, int64_t b, int64_t slot, int32_t bits, EmittedRow& out) {
  if (bits) set_status(p.status, slot, bits);
  out.finish();
  p.out_len[b] = static_cast<int32_t>(out.len);
}

// Calls f.template operator()<T, kAdjusted, kSampled>() for the kernels of a call.
template <class F>
void with_kinds(const VerifyTreeParams& p, F&& f) {
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

// Bytes of workspace that a call needs, and the name of its plan; "cpu" on the CPU.
int64_t verify_tree_workspace(const TensorView& logits, std::optional<int64_t> num_nodes, const OptTensor& temperature,
                              const OptTensor& draft_logits, const std::optional<std::string>& plan);
std::string verify_tree_plan(const TensorView& logits, std::optional<int64_t> num_nodes, const OptTensor& temperature,
                             const OptTensor& draft_logits, const std::optional<std::string>& plan);

void verify_tree_cpu(const VerifyTreeParams& p);
void verify_tree_cuda(const VerifyTreeParams& p, Stream stream);
void verify_at_once_cuda(const VerifyTreeParams& p, Stream stream);
// These two verify sampled candidates (sampled_walk.h).
void verify_sampled_cpu(const VerifyTreeParams& p);
void verify_sampled_cuda(const VerifyTreeParams& p, Stream stream);

}  // namespace specdec::verify
