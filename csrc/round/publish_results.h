// Writes the results of a round as the next record of the host's ring.
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
  const int32_t* num_logprobs;  // [num_slots]: negative if the request wants no scores
  // For comparing budget levels; null if there is nothing to choose.
  const int32_t* path;          // [batch, layout.accept_width]: the node of each token
  const int32_t* level_limits;  // [layout.num_levels], increasing: most nodes of a request at each level
  // Null if drafts are sampled: then a level has the first nodes of each tree.
  const float* node_scores;  // [batch, nodes]: log-probabilities of paths
  const float* cuts;         // [layout.num_levels], decreasing: score of the worst node of each level
  const int32_t* max_nodes;  // [num_slots]: most nodes of a request
  int64_t batch, num_slots, nodes, depth, words;
  ResultLayout layout;
};

void publish_results(CallStream stream, const TensorView& results, const TensorView& num_published,
                     const TensorView& started_at, const TensorView& tokens, const TensorView& num_valid,
                     const TensorView& num_nodes, const TensorView& finish_reasons, const TensorView& status,
                     const OptTensor& slots, const OptTensor& logprobs, const OptTensor& top_ids,
                     const OptTensor& top_logprobs, const OptTensor& num_logprobs, const OptTensor& path,
                     const OptTensor& level_limits, const OptTensor& node_scores, const OptTensor& cuts,
                     const OptTensor& max_nodes);

void publish_results_cpu(const PublishResultsParams& p);
void publish_results_cuda(const PublishResultsParams& p, Stream stream);

// Returns word `word` of row b.
SD_HD int32_t result_word(const PublishResultsParams& p, int64_t b, int64_t word) {
  const ResultLayout& layout = p.layout;
  if (word >= ResultLayout::kTokens) return p.tokens[b * layout.accept_width + word - ResultLayout::kTokens];
  if (word == ResultLayout::kNumValid) return p.num_valid[b];
  if (word == ResultLayout::kNumNodes) return p.num_nodes[b];
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  if (slot < 0) return 0;
  return word == ResultLayout::kStatus ? p.status[slot] : p.finish_reasons[slot];
}

// Returns whether the scores of row b are published.
SD_HD bool has_scores(const PublishResultsParams& p, int64_t b) {
  if (p.layout.top_n == ResultLayout::kNoScores) return false;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  return slot >= 0 && p.num_logprobs[slot] >= 0;
}

// Returns word `word` of the scores of row b, which has scores.
SD_HD int32_t score_word(const PublishResultsParams& p, int64_t b, int64_t word) {
  const int64_t width = p.layout.accept_width, tops = width * p.layout.top_n;
  if (word < width) return std::bit_cast<int32_t>(p.logprobs[b * width + word]);
  word -= width;
  if (word < tops) return p.top_ids[b * tops + word];
  return std::bit_cast<int32_t>(p.top_logprobs[b * tops + word - tops]);
}

// Counts, over the rows that continue, the drafts whose first level is each level: those predicted (as weights) and
// those accepted. Drafts that no level has are not counted.
struct LevelCounts {
  int32_t num_continuing;
  uint64_t predicted[kMaxLevels];
  int32_t observed[kMaxLevels];
};

// Returns whether row b continues: its tokens were not cut off, so they show how good its drafts were.
SD_HD bool continues(const PublishResultsParams& p, int64_t b) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  return slot >= 0 && p.num_valid[b] > 0 && p.finish_reasons[slot] == 0;
}

// Returns the first level that has node i of row b's tree, or num_levels if none has.
SD_HD int64_t first_level(const PublishResultsParams& p, int64_t b, int64_t i) {
  int64_t level = 0;
  while (level < p.layout.num_levels && i >= p.level_limits[level]) ++level;
  if (!p.node_scores) return level;
  const float score = p.node_scores[b * p.nodes + i];
  while (level < p.layout.num_levels && !(score >= p.cuts[level])) ++level;
  return level;
}

// Returns how many nodes of row b's tree a level may have, the root included.
SD_HD int64_t nodes_of(const PublishResultsParams& p, int64_t b) {
  return p.node_scores ? clamp_to<int64_t>(p.max_nodes[slot_of(p.slots, b, p.num_slots)], 1, p.nodes) : 1;
}

// Sets `node` to the node of token j of row b, and returns whether it is a draft that the round had. The first token
// follows the root.
SD_HD bool is_draft(const PublishResultsParams& p, int64_t b, int64_t j, int32_t& node) {
  if (j == 0 || j >= p.num_valid[b]) return false;
  node = p.path[b * p.layout.accept_width + j];
  return node > 0 && (!p.node_scores || node < p.nodes);
}

// Writes the words of level r: the sums over levels 0 to r.
SD_HD void write_level(const PublishResultsParams& p, int32_t* record, int64_t r, const LevelCounts& counts) {
  uint64_t predicted = 0;
  int32_t observed = 0;
  for (int64_t i = 0; i <= r; ++i) {
    predicted += counts.predicted[i];
    observed += counts.observed[i];
  }
  const float sum = p.node_scores ? sum_of(predicted) : static_cast<float>(observed);
  record[ResultLayout::kPredicted + r] = std::bit_cast<int32_t>(sum);
  record[p.layout.observed() + r] = observed;
}

}  // namespace specdec::round
