// select_topk: compute log-softmax and the k best entries of every row of draft logits, in one pass over the logits.
#pragma once

#include "core/dispatch.h"

namespace specdec::draft {

struct SelectTopkParams {
  const void* logits;  // [rows, vocab], float dtype, rows `logits_stride` elements apart
  Dtypes logits_dtype;
  int64_t logits_stride;
  const int32_t* id_map;  // [vocab] or null: draft id -> target id
  int32_t* out_ids;       // [rows, k]
  float* out_logprobs;    // [rows, k], <= 0
  int64_t rows, vocab, k;
};

constexpr int64_t kMaxTopk = 64;

void select_topk(CallStream stream, const TensorView& logits, int64_t k, const OptTensor& id_map,
                 const TensorView& out_ids, const TensorView& out_logprobs);

void select_topk_cpu(const SelectTopkParams& p);
void select_topk_cuda(const SelectTopkParams& p, Stream stream);

}  // namespace specdec::draft
