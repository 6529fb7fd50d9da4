#include "round/publish_results.h"

#include <atomic>
#include <cstring>
#include <limits>

#include "round/clock.h"
#include "round/shared_memory.h"

namespace specdec::round {

void publish_results(CallStream stream, const TensorView& results, const TensorView& num_published,
                     const TensorView& started_at, const TensorView& tokens, const TensorView& num_valid,
                     const TensorView& num_nodes, const TensorView& finish_reasons, const TensorView& status,
                     const OptTensor& slots, const OptTensor& logprobs, const OptTensor& top_ids,
                     const OptTensor& top_logprobs, const OptTensor& num_logprobs, const OptTensor& path,
                     const OptTensor& level_limits, const OptTensor& node_scores, const OptTensor& cuts,
                     const OptTensor& max_nodes) {
  Check check("publish_results");
  Dim R{"num_slots"}, B{"batch"}, S{"accept_width"}, K{"top_n"}, N{"num_nodes", 0}, G{"num_levels", 0}, D{"depth"},
      W{"words"};
  check.output("num_published", num_published, {1}, kInt64);
  check.tensor("started_at", started_at, {1}, kInt64);
  check.tensor("tokens", tokens, {B, S}, kInt32);
  check.tensor("num_valid", num_valid, {B}, kInt32);
  check.tensor("num_nodes", num_nodes, {B}, kInt32);
  check.tensor("finish_reasons", finish_reasons, {R}, kInt32);
  check.tensor("status", status, {R}, kInt32);
  check.slots(slots, B, R);
  check.tensor("logprobs", logprobs, {B, S}, kFloat32);
  const auto expect_with = [&](const char* name, bool given, const char* other, bool with) {
    check.that(given || !with, name, "is None", {"a tensor, since ", other, " is given"});
    check.that(!given || with, name, "is given", {"None, since ", other, " is None"});
  };
  expect_with("top_ids", top_ids.has_value(), "logprobs", logprobs.has_value());
  expect_with("top_logprobs", top_logprobs.has_value(), "logprobs", logprobs.has_value());
  expect_with("num_logprobs", num_logprobs.has_value(), "logprobs", logprobs.has_value());
  check.tensor("top_ids", top_ids, {B, S, K}, kInt32);
  check.tensor("top_logprobs", top_logprobs, {B, S, K}, kFloat32);
  check.tensor("num_logprobs", num_logprobs, {R}, kInt32);
  expect_with("path", path.has_value(), "level_limits", level_limits.has_value());
  expect_with("cuts", cuts.has_value(), "node_scores", node_scores.has_value());
  expect_with("max_nodes", max_nodes.has_value(), "node_scores", node_scores.has_value());
  check.that(level_limits || !node_scores, "node_scores", "is given", "None, since level_limits is None");
  if (level_limits) G.value = -1;
  if (node_scores) N.value = -1;
  check.tensor("path", path, {B, S}, kInt32);
  check.tensor("level_limits", level_limits, {G}, kInt32);
  check.range("num_levels", G, 0, kMaxLevels);
  check.tensor("node_scores", node_scores, {B, N}, kFloat32);
  check.range("batch * num_nodes", B * N, 0, kMostWeights);
  check.tensor("cuts", cuts, {G}, kFloat32);
  check.tensor("max_nodes", max_nodes, {R}, kInt32);
  Check ring("publish_results");
  ring.output("results", results, {D, W}, kInt32);
  const ResultLayout layout{.accept_width = S, .num_levels = G, .top_n = logprobs ? K.value : ResultLayout::kNoScores};
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  ring.range("depth", D, 1, kMost);
  ring.range("words", W, layout.words(B), kMost);
  ring.that(reinterpret_cast<uintptr_t>(results.data<void>()) % 8 == 0 && W % 2 == 0, "results",
            "has rows that start between two multiples of 8 bytes", "an aligned tensor with an even number of words");

  const PublishResultsParams params{
      .results = shared_words(check, "results", results),
      .num_published = num_published.data<int64_t>(),
      .started_at = started_at.data<int64_t>(),
      .tokens = tokens.data<int32_t>(),
      .num_valid = num_valid.data<int32_t>(),
      .num_nodes = num_nodes.data<int32_t>(),
      .finish_reasons = finish_reasons.data<int32_t>(),
      .status = status.data<int32_t>(),
      .slots = data_or_null<const int32_t>(slots),
      .logprobs = data_or_null<const float>(logprobs),
      .top_ids = data_or_null<const int32_t>(top_ids),
      .top_logprobs = data_or_null<const float>(top_logprobs),
      .num_logprobs = data_or_null<const int32_t>(num_logprobs),
      .path = data_or_null<const int32_t>(path),
      .level_limits = data_or_null<const int32_t>(level_limits),
      .node_scores = data_or_null<const float>(node_scores),
      .cuts = data_or_null<const float>(cuts),
      .max_nodes = data_or_null<const int32_t>(max_nodes),
      .batch = B,
      .num_slots = R,
      .nodes = N,
      .depth = D,
      .words = W,
      .layout = layout,
  };
  SD_DISPATCH(check, stream, publish_results, params);
}

void publish_results_cpu(const PublishResultsParams& p) {
  const int64_t number = *p.num_published;
  int32_t* record = p.results + ring_row(number, p.depth) * p.words;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i < p.layout.row_words(); ++i) record[p.layout.row(b) + i] = result_word(p, b, i);
    if (!has_scores(p, b)) continue;
    for (int64_t i = 0; i < p.layout.score_words(); ++i) record[p.layout.scores(b, p.words) + i] = score_word(p, b, i);
  }
  LevelCounts counts{};
  for (int64_t b = 0; b < p.batch; ++b) {
    if (!continues(p, b)) continue;
    ++counts.num_continuing;
    if (p.layout.num_levels == 0) continue;
    const auto first_of = [&](int64_t node) { return first_level(p, b, node); };
    for (int64_t i = 1, count = nodes_of(p, b); i < count; ++i)
      if (const int64_t level = first_of(i); level < p.layout.num_levels)
        counts.predicted[level] += weight_of(p.node_scores[b * p.nodes + i]);
    int32_t node;
    for (int64_t j = 0; j < p.layout.accept_width; ++j)
      if (is_draft(p, b, j, node) && first_of(node) < p.layout.num_levels) ++counts.observed[first_of(node)];
  }
  record[ResultLayout::kNumContinuing] = counts.num_continuing;
  for (int64_t r = 0; r < p.layout.num_levels; ++r) write_level(p, record, r, counts);
  const int64_t times[] = {*p.started_at, nanoseconds()};
  std::memcpy(record + ResultLayout::kStarted, times, sizeof times);
  *p.num_published = add_wrapped(number, 1);
  std::atomic_ref(record[ResultLayout::kNumber]).store(done_mark(number), std::memory_order_release);
}

}  // namespace specdec::round
