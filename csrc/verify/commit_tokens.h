// commit_tokens: truncate each request's emitted tokens at a stop token or a length limit and advance its slot.
//
// Reads the emitted tokens of a round and the slot's limits. Writes, per slot: sequence length, remaining tokens, next
// root token and finish reason. Rules: commit_row.h. GPU: one warp per request (commit_tokens.cu).
#pragma once

#include "core/dispatch.h"

namespace specdec::verify {

struct CommitTokensParams {
  int32_t* tokens;              // [batch, accept_width], in and out: truncated tokens become -1
  int32_t* num_valid;           // [batch], in and out
  const int32_t* stop_tokens;   // [num_slots, max_stops], -1 for none
  int32_t* remaining;           // [num_slots]: tokens that the request may still emit
  const int32_t* max_seq_lens;  // [num_slots]: maximum tokens of the sequence, prompt and root included
  int32_t* seq_lens;            // [num_slots]
  int32_t* prefix_lens;         // [num_slots]
  int32_t* root_tokens;         // [num_slots]
  int32_t* finish_reasons;      // [num_slots], FinishReason
  const int32_t* slots;         // [batch] or null
  int32_t* status;              // [num_slots] or null
  int32_t* counts;              // [num_slots, vocab] or null: 2 * times generated + in prompt (edit_logits)
  int32_t* out;                 // [batch]: num_valid of slots that keep running, else 0
  int64_t batch, accept_width, max_stops, num_slots, vocab;
};

void commit_tokens(CallStream stream, const TensorView& tokens, const TensorView& num_valid,
                   const TensorView& stop_tokens, const TensorView& remaining, const TensorView& max_seq_lens,
                   const TensorView& seq_lens, const TensorView& prefix_lens, const TensorView& root_tokens,
                   const TensorView& finish_reasons, const OptTensor& slots, const OptTensor& status,
                   const OptTensor& counts, const TensorView& out);

void commit_tokens_cpu(const CommitTokensParams& p);
void commit_tokens_cuda(const CommitTokensParams& p, Stream stream);

}  // namespace specdec::verify
