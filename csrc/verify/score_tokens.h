// score_tokens: write the log-probability of each emitted token and the best alternatives at its node.
#pragma once

#include "core/dispatch.h"
#include "core/host_device.h"
#include "core/packed_rows.h"
#include "core/slots.h"

namespace specdec::verify {

struct ScoreTokensParams {
  const void* logits;  // [batch, num_nodes, vocab] or [num_rows, vocab], with the strides below, in elements
  Dtypes logits_dtype;
  int64_t logits_batch_stride, logits_node_stride;
  const int32_t* path;       // [batch, width]: the node whose logits chose each token
  const int32_t* tokens;     // [batch, width]
  const int32_t* num_valid;  // [batch]: valid tokens of each row
  const int32_t* slots;      // [batch] or null
  // [num_slots] or null: how many of the top_n a slot wants (null: all); negative: its tokens are not scored.
  const int32_t* num_logprobs;
  const int32_t* cu_seqlens_q;  // [batch + 1] or null: row offsets of packed rows
  float* out_logprobs;          // [batch, width]
  int32_t* out_top_ids;         // [batch, width, top_n]
  float* out_top_logprobs;      // [batch, width, top_n]
  int64_t batch, num_nodes, num_rows, vocab, width, top_n, num_slots;
};

constexpr int64_t kMaxTopAlternatives = 64;

// Return how many alternatives row b wants; negative: it is not scored.
SD_HD int64_t wanted_top_n(const ScoreTokensParams& p, int64_t b) {
  if (!p.num_logprobs) return p.top_n;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int64_t wanted = slot < 0 ? -1 : p.num_logprobs[slot];
  return wanted < p.top_n ? wanted : p.top_n;
}

// Return the offset, in elements, of the logits of token j of row b. Return -1 if there is no such token: beyond the
// row's length, or with a node or token out of range.
SD_HD int64_t logits_of_token(const ScoreTokensParams& p, int64_t b, int64_t j) {
  const int64_t node = p.path[b * p.width + j], token = p.tokens[b * p.width + j];
  const RowRange nodes = p.cu_seqlens_q ? packed_rows(p.cu_seqlens_q, b, p.num_rows) : RowRange{0, p.num_nodes};
  const bool used = j < p.num_valid[b] && node >= 0 && node < nodes.count && token >= 0 && token < p.vocab;
  return used ? b * p.logits_batch_stride + (nodes.first + node) * p.logits_node_stride : -1;
}

void score_tokens(CallStream stream, const TensorView& logits, const TensorView& path, const TensorView& tokens,
                  const TensorView& num_valid, int64_t top_n, const OptTensor& slots, const OptTensor& num_logprobs,
                  const OptTensor& cu_seqlens_q, const TensorView& out_logprobs, const TensorView& out_top_ids,
                  const TensorView& out_top_logprobs);

void score_tokens_cpu(const ScoreTokensParams& p);
void score_tokens_cuda(const ScoreTokensParams& p, Stream stream);

}  // namespace specdec::verify
