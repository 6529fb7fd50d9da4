// publish_results: what a round did, as the next record of the host's ring.
#pragma once

#include <bit>

#include "core/bits.h"
#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/slots.h"
#include "round/records.h"

namespace specdec::round {

struct PublishResultsParams {
  int32_t* results;               // [depth, words]
  int64_t* num_published;         // [1]: rounds published so far
  const int64_t* started_at;      // [1]
  const int32_t* tokens;          // [batch, layout.accept_width]
  const int32_t* num_valid;       // [batch]
  const int32_t* num_nodes;       // [batch]
  const int32_t* finish_reasons;  // [num_slots]
  const int32_t* status;          // [num_slots]
  const int32_t* slots;           // [batch] or null
  // Scores of the tokens (score_tokens), or all null.
  const float* logprobs;        // [batch, layout.accept_width]
  const int32_t* top_ids;       // [batch, layout.accept_width, layout.top_n]
  const float* top_logprobs;    // [batch, layout.accept_width, layout.top_n]
  const int32_t* num_logprobs;  // [num_slots]: negative where nobody asked
  // What the rungs are compared by; null where there are none.
  const int32_t* path;         // [batch, layout.accept_width]: the node behind each token
  const int32_t* rung_limits;  // [layout.num_rungs], rising: nodes that a request gets at most
  // Null where drafts are drawn: then a rung has the first nodes of each tree.
  const float* node_scores;  // [batch, nodes]: log-probabilities of paths
  const float* cuts;         // [layout.num_rungs], falling: of the worst node of each rung
  const int32_t* max_nodes;  // [num_slots]: nodes that a request gets at most
  int64_t batch, num_slots, nodes, depth, words;
  ResultLayout layout;
};

void publish_results(CallStream stream, const TensorView& results, const TensorView& num_published,
                     const TensorView& started_at, const TensorView& tokens, const TensorView& num_valid,
                     const TensorView& num_nodes, const TensorView& finish_reasons, const TensorView& status,
                     const OptTensor& slots, const OptTensor& logprobs, const OptTensor& top_ids,
                     const OptTensor& top_logprobs, const OptTensor& num_logprobs, const OptTensor& path,
                     const OptTensor& rung_limits, const OptTensor& node_scores, const OptTensor& cuts,
                     const OptTensor& max_nodes);

void publish_results_cpu(const PublishResultsParams& p);
void publish_results_cuda(const PublishResultsParams& p, Stream stream);

// Word `word` of row b.
SD_HD int32_t result_word(const PublishResultsParams& p, int64_t b, int64_t word) {
  const ResultLayout& layout = p.layout;
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

// What the rows that go on say of the rungs: how many these rows are, and the drafts that each rung is the first to
// have, those expected (as weights) and those accepted. A draft that no rung would have had is none's.
struct Shown {
  int32_t going_on;
  uint64_t expected[kMostRungs];
  int32_t realised[kMostRungs];
};

// Whether row b goes on: what it was given has not been cut, and says how good its drafts were.
SD_HD bool goes_on(const PublishResultsParams& p, int64_t b) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  return slot >= 0 && p.num_valid[b] > 0 && p.finish_reasons[slot] == 0;
}

// The first rung that has node i of row b's tree; num_rungs where none has.
SD_HD int64_t first_rung(const PublishResultsParams& p, int64_t b, int64_t i) {
  int64_t rung = 0;
  while (rung < p.layout.num_rungs && i >= p.rung_limits[rung]) ++rung;
  if (!p.node_scores) return rung;
  const float score = p.node_scores[b * p.nodes + i];
  while (rung < p.layout.num_rungs && !(score >= p.cuts[rung])) ++rung;
  return rung;
}

// The nodes of row b's tree that a rung may have, the root included.
SD_HD int64_t nodes_of(const PublishResultsParams& p, int64_t b) {
  return p.node_scores ? clamp_to<int64_t>(p.max_nodes[slot_of(p.slots, b, p.num_slots)], 1, p.nodes) : 1;
}

// The node behind token j of row b, and whether it is a draft that the round had. The first token follows the root.
SD_HD bool is_draft(const PublishResultsParams& p, int64_t b, int64_t j, int32_t& node) {
  if (j == 0 || j >= p.num_valid[b]) return false;
  node = p.path[b * p.layout.accept_width + j];
  return node > 0 && (!p.node_scores || node < p.nodes);
}

// Words of rung r, of what it and those before it are the first to have.
SD_HD void write_rung(const PublishResultsParams& p, int32_t* record, int64_t r, const Shown& shown) {
  uint64_t expected = 0;
  int32_t realised = 0;
  for (int64_t i = 0; i <= r; ++i) {
    expected += shown.expected[i];
    realised += shown.realised[i];
  }
  const float promised = p.node_scores ? sum_of(expected) : static_cast<float>(realised);
  record[ResultLayout::kExpected + r] = std::bit_cast<int32_t>(promised);
  record[p.layout.realised() + r] = realised;
}

}  // namespace specdec::round
