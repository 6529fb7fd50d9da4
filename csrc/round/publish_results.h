// publish_results: what a round did, as the next record of the host's ring.
#pragma once

#include <bit>

#include "core/dispatch.h"
#include "core/slots.h"
#include "round/records.h"

namespace specdec::round {

struct PublishResultsParams {
  int32_t* results;               // [depth, words]
  int64_t* num_published;         // [1]: rounds published so far
  const int64_t* started_at;      // [1]
  const int32_t* tokens;          // [batch, layout.accept_width]
  const int32_t* num_valid;       // [batch]
  const int32_t* path;            // [batch, layout.accept_width]
  const int32_t* num_nodes;       // [batch]
  const int32_t* finish_reasons;  // [num_slots]
  const int32_t* status;          // [num_slots]
  const int32_t* slots;           // [batch] or null
  // Scores of the tokens (score_tokens), or all null.
  const float* logprobs;        // [batch, layout.accept_width]
  const int32_t* top_ids;       // [batch, layout.accept_width, layout.top_n]
  const float* top_logprobs;    // [batch, layout.accept_width, layout.top_n]
  const int32_t* num_logprobs;  // [num_slots]: negative where nobody asked
  int64_t batch, num_slots, depth, words;
  ResultLayout layout;
};

void publish_results(CallStream stream, const TensorView& results, const TensorView& num_published,
                     const TensorView& started_at, const TensorView& tokens, const TensorView& num_valid,
                     const TensorView& path, const TensorView& num_nodes, const TensorView& finish_reasons,
                     const TensorView& status, const OptTensor& slots, const OptTensor& logprobs,
                     const OptTensor& top_ids, const OptTensor& top_logprobs, const OptTensor& num_logprobs);

void publish_results_cpu(const PublishResultsParams& p);
void publish_results_cuda(const PublishResultsParams& p, Stream stream);

// Word `word` of row b.
SD_HD int32_t result_word(const PublishResultsParams& p, int64_t b, int64_t word) {
  const ResultLayout& layout = p.layout;
  if (word >= layout.path()) return p.path[b * layout.accept_width + word - layout.path()];
  if (word >= ResultLayout::kTokens) return p.tokens[b * layout.accept_width + word - ResultLayout::kTokens];
  if (word == ResultLayout::kNumValid) return p.num_valid[b];
  if (word == ResultLayout::kNumNodes) return p.num_nodes[b];
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  if (slot < 0) return 0;
  return word == ResultLayout::kStatus ? p.status[slot] : p.finish_reasons[slot];
}

// Whether the scores of row b are published.
SD_HD bool has_scores(const PublishResultsParams& p, int64_t b) {
  if (p.layout.top_n == ResultLayout::kNoScores) return false;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  return slot >= 0 && p.num_logprobs[slot] >= 0;
}

// Word `word` of the scores of row b, which has some.
SD_HD int32_t score_word(const PublishResultsParams& p, int64_t b, int64_t word) {
  const int64_t width = p.layout.accept_width, tops = width * p.layout.top_n;
  if (word < width) return std::bit_cast<int32_t>(p.logprobs[b * width + word]);
  word -= width;
  if (word < tops) return p.top_ids[b * tops + word];
  return std::bit_cast<int32_t>(p.top_logprobs[b * tops + word - tops]);
}

}  // namespace specdec::round
