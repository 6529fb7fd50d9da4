// verify_tree: walks each request's tree along the target's own choices and emits the accepted drafts and the bonus.
#pragma once

#include "core/dispatch.h"
#include "verify/tree_walk.h"

namespace specdec {

struct VerifyTreeParams {
  const void* logits;  // [batch, num_nodes, vocab], float dtype; requests and nodes this many elements apart:
  Dtypes logits_dtype;
  int64_t logits_batch_stride, logits_node_stride;
  TreeLinks links;
  const int32_t* tree_sizes;  // [batch]: nodes in use of each tree; <= 0 is an empty row
  const int32_t* slots;       // [batch] or null
  int32_t* status;            // [num_slots] or null
  int32_t* out_tokens;        // [batch, accept_width]: accepted drafts, bonus, -1
  int32_t* out_len;           // [batch]
  int32_t* out_path;          // [batch, accept_width]: node of each emitted token's KV row, the last one repeated
  int64_t batch, vocab, accept_width;
  int64_t num_slots;
};

// The sampling arguments and draft_logits, draft_rows are refused: verification is greedy.
void verify_tree(CallStream stream, const TensorView& logits, const TensorView& tokens, const TensorView& parents,
                 const TensorView& first_child, const TensorView& next_sibling, const TensorView& num_nodes,
                 int64_t accept_width, const OptTensor& slots, const OptTensor& temperature, const OptTensor& top_k,
                 const OptTensor& top_p, const OptTensor& min_p, const OptTensor& seed, const OptTensor& draft_logits,
                 const OptTensor& draft_rows, const OptTensor& status, const TensorView& out_tokens,
                 const TensorView& out_len, const TensorView& out_path);

void verify_tree_cpu(const VerifyTreeParams& p);
void verify_tree_cuda(const VerifyTreeParams& p, Stream stream);

}  // namespace specdec
