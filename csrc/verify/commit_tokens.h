// commit_tokens: cuts each request's emitted tokens at a stop token or a limit and advances its slot.
#pragma once

#include "core/dispatch.h"

namespace specdec {

struct CommitTokensParams {
  int32_t* out_tokens;         // [batch, accept_width], in and out: what is cut off becomes -1
  int32_t* out_len;            // [batch], in and out
  const int32_t* stop_tokens;  // [num_slots, max_stops], -1 for none
  int32_t* remaining;          // [num_slots]: tokens the request may still emit
  const int32_t* max_lens;     // [num_slots]: tokens the sequence may have, prompt and root included
  int32_t* seq_lens;           // [num_slots]
  int32_t* seq_lens_before;    // [num_slots]
  int32_t* root_tokens;        // [num_slots]
  int32_t* finish_reasons;     // [num_slots], FinishReason
  const int32_t* slots;        // [batch] or null
  int32_t* status;             // [num_slots] or null
  int32_t* out_num_valid;      // [batch]: out_len of slots that go on, else 0
  int64_t batch, accept_width, max_stops, num_slots;
};

void commit_tokens(CallStream stream, const TensorView& out_tokens, const TensorView& out_len,
                   const TensorView& stop_tokens, const TensorView& remaining, const TensorView& max_lens,
                   const TensorView& seq_lens, const TensorView& seq_lens_before, const TensorView& root_tokens,
                   const TensorView& finish_reasons, const OptTensor& slots, const OptTensor& status,
                   const TensorView& out_num_valid);

void commit_tokens_cpu(const CommitTokensParams& p);
void commit_tokens_cuda(const CommitTokensParams& p, Stream stream);

}  // namespace specdec
