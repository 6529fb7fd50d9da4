// expand_trellis: argument checks and the CPU implementation.
#include "draft/expand_trellis.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/best_list.h"
#include "core/floats.h"
#include "draft/select_topk.h"

namespace specdec::draft {

void expand_trellis(CallStream stream, const TensorView& topk_ids, const TensorView& topk_logprobs,
                    int64_t num_candidates, const OptTensor& predecessors, const OptTensor& successors,
                    const OptTensor& gates, const OptTensor& root_tokens, const OptTensor& id_map,
                    const OptTensor& calibration, int64_t width, const TensorView& out_tokens,
                    const TensorView& out_parents, const TensorView& out_scores) {
  Check check("expand_trellis");
  Dim B{"batch"}, D{"depth"}, K{"k"}, N{"num_candidates", num_candidates};
  Dim rank{"rank"}, predecessor_rows{"predecessor_rows"}, successor_rows{"successor_rows"}, map_rows{"draft_vocab"};
  check.tensor("topk_ids", topk_ids, {B, D, K}, kInt32);
  check.range("depth", D, 1, kMaxTrellisDepth);
  check.range("k", K, 1, kMaxTopk);
  check.tensor("topk_logprobs", topk_logprobs, {B, D, K}, kFloat32);
  check.range("num_candidates", N, 1, kMaxTrellisNodes);
  const bool has_predecessor_rows = predecessors && predecessors->ndim() == 4;
  if (predecessors) {
    if (has_predecessor_rows)
      check.tensor("predecessors", *predecessors, {B, D, K, rank}, kFloats);
    else
      check.tensor("predecessors", *predecessors, {predecessor_rows, rank}, kFloats);
    check.range("rank", rank, 1, kMaxTransitionRank);
  }
  check.that(bool(successors) == bool(predecessors), "successors", successors ? "is given" : "is None",
             predecessors ? "a table next to predecessors" : "None without predecessors");
  const Dtypes factor_dtype = predecessors ? dtype_of(*predecessors) : kFloat32;
  check.tensor("successors", successors, {successor_rows, rank}, factor_dtype);
  check.that(!gates || (predecessors && !has_predecessor_rows), "gates", "is given",
             "None without a table of predecessors");
  check.tensor("gates", gates, {B, D, rank}, factor_dtype);
  const bool needs_root = predecessors && !has_predecessor_rows;
  check.that(bool(root_tokens) == needs_root, "root_tokens", root_tokens ? "is given" : "is None",
             needs_root ? "tokens next to a table of predecessors" : "None without a table of predecessors");
  check.tensor("root_tokens", root_tokens, {B}, kInt32);
  check.tensor("id_map", id_map, {map_rows}, kInt32);
  Dim depths{"num_depths"};
  check.tensor("calibration", calibration, {depths, 2}, kFloat32);
  if (calibration) check.range("num_depths", depths, 1, kMaxCalibratedDepths);
  check.range("width", width, 1, kMaxTrellisNodes);
  check.output("out.tokens", out_tokens, {B, N}, kInt32);
  check.output("out.parents", out_parents, {B, N}, kInt32);
  check.output("out.scores", out_scores, {B, N}, kFloat32);
  if (B == 0) return;

  const ExpandTrellisParams params{
      .topk_ids = topk_ids.data<const int32_t>(),
      .topk_logprobs = topk_logprobs.data<const float>(),
      .factor_dtype = factor_dtype,
      .predecessors = data_or_null<const void>(predecessors),
      .successors = data_or_null<const void>(successors),
      .gates = data_or_null<const void>(gates),
      .root_tokens = data_or_null<const int32_t>(root_tokens),
      .id_map = data_or_null<const int32_t>(id_map),
      .calibration = data_or_null<const float>(calibration),
      .out_tokens = out_tokens.data<int32_t>(),
      .out_parents = out_parents.data<int32_t>(),
      .out_scores = out_scores.data<float>(),
      .batch = B,
      .depth = D,
      .k = K,
      .rank = std::max<int64_t>(rank, 0),
      .predecessor_rows = std::max<int64_t>(predecessor_rows, 0),
      .successor_rows = std::max<int64_t>(successor_rows, 0),
      .id_map_rows = std::max<int64_t>(map_rows, 0),
      .nodes = N,
      .width = width,
      .depths = depths,
      .has_predecessor_rows = has_predecessor_rows,
  };
  SD_DISPATCH(check, stream, expand_trellis, params);
}

namespace {

// Write the factor of predecessor c of position d, gated, as floats.
template <class T>
void read_predecessor(const ExpandTrellisParams& p, int64_t b, int64_t d, int64_t c, float* out) {
  const T* row = predecessor_row<T>(p, b, d, c);
  const T* gate = gate_row<T>(p, b, d);
  for (int64_t r = 0; r < p.rank; ++r) {
    out[r] = row ? to_float(row[r]) : 0.0f;
    if (gate) out[r] = to_float(from_float<T>(mul(out[r], to_float(gate[r]))));
  }
}

template <class T>
float dot(const float* a, const T* b, int64_t size) {
  constexpr int64_t kLanes = 8;
  float sums[kLanes] = {};
  int64_t r = 0;
  for (; r + kLanes <= size; r += kLanes)
    for (int64_t i = 0; i < kLanes; ++i) sums[i] = fused(a[r + i], to_float(b[r + i]), sums[i]);
  for (; r < size; ++r) sums[0] = fused(a[r], to_float(b[r]), sums[0]);
  float sum = 0;
  for (const float lane : sums) sum += lane;
  return sum;
}

// Replace transition scores [k] by log-probabilities.
void normalise(const float* unary, int64_t k, float rest, float* row) {
  float max = rest;
  for (int64_t c = 0; c < k; ++c) {
    row[c] = transition_logit(unary[c], row[c]);
    max = std::max(max, row[c]);
  }
  uint64_t weights = transition_weight(rest, max);
  for (int64_t c = 0; c < k; ++c) weights += transition_weight(row[c], max);
  const float log_weights = log_of_weights(weights);
  for (int64_t c = 0; c < k; ++c) row[c] = transition_logprob(row[c], max, log_weights);
}

// The log-probabilities of position d's candidates after each of the position before: [k], for all alike, or [k, k].
struct Conditionals {
  std::vector<float> values;
  int64_t stride;  // 0: no transitions

  const float* after(int64_t predecessor) const { return values.data() + predecessor * stride; }
};

template <class T>
Conditionals conditionals(const ExpandTrellisParams& p, int64_t b, int64_t d) {
  const float* logprobs = p.topk_logprobs + (b * p.depth + d) * p.k;
  std::vector<float> unary(p.k);
  for (int64_t c = 0; c < p.k; ++c) unary[c] = valid_logprob(logprobs[c]);
  const Platt platt = platt_of(p.calibration, p.depths, d + 1);
  Conditionals result{unary, 0};
  if (p.predecessors) {
    uint64_t weights = 0;
    for (const float x : unary) weights += weight_of(x);
    const float rest = rest_logprob(weights);
    const int64_t rows = d == 0 ? 1 : p.k;
    result = {std::vector<float>(rows * p.k), p.k};
    std::vector<float> factor(p.rank);
    for (int64_t c = 0; c < rows; ++c) {
      float* row = result.values.data() + c * p.k;
      read_predecessor<T>(p, b, d, c, factor.data());
      for (int64_t i = 0; i < p.k; ++i) {
        const T* successor = successor_row<T>(p, b, d, i);
        row[i] = successor ? dot(factor.data(), successor, p.rank) : 0.0f;
      }
      normalise(unary.data(), p.k, rest, row);
    }
  }
  for (float& x : result.values) x = calibrated(platt, x);
  return result;
}

struct TrellisNode {
  float score;
  int32_t parent, candidate;  // the parent's rank in the beam of the position before
};

template <class T>
void expand_row(const ExpandTrellisParams& p, int64_t b) {
  std::vector<std::vector<TrellisNode>> beams;
  for (int64_t d = 0; d < std::min(p.depth, p.nodes); ++d) {
    const Conditionals scores = conditionals<T>(p, b, d);
    const std::vector<TrellisNode> root{{0.0f, -1, 0}};
    const std::vector<TrellisNode>& before = d == 0 ? root : beams.back();
    BestList<kMaxTrellisNodes> best(static_cast<int>(std::min(p.nodes - d, p.width)));
    for (size_t i = 0; i < before.size(); ++i) {
      const float* row = scores.after(before[i].candidate);
      for (int64_t c = 0; c < p.k; ++c) {
        const float score = child_score(before[i].score, row[c]);
        if (score > -INFINITY) best.offer(score, static_cast<int32_t>(i * p.k + c));
      }
    }
    std::vector<TrellisNode>& beam = beams.emplace_back(best.count());
    for (int j = 0; j < best.count(); ++j)
      beam[j] = {best.scores()[j], static_cast<int32_t>(best.ids()[j] / p.k),
                 static_cast<int32_t>(best.ids()[j] % p.k)};
    if (beam.empty()) break;
  }

  // Position d's node of rank j has id d * nodes + j: equal scores go to the lower id.
  BestList<kMaxTrellisNodes> best(static_cast<int>(p.nodes));
  for (size_t d = 0; d < beams.size(); ++d)
    for (size_t j = 0; j < beams[d].size(); ++j) best.offer(beams[d][j].score, static_cast<int32_t>(d * p.nodes + j));
  std::vector<int32_t> place_of(beams.size() * p.nodes, -1);
  for (int64_t i = 0; i < p.nodes; ++i) {
    const int64_t at = b * p.nodes + i;
    p.out_tokens[at] = 0;
    p.out_parents[at] = -1;
    p.out_scores[at] = -INFINITY;
    if (i >= best.count()) continue;
    const int64_t d = best.ids()[i] / p.nodes;
    const TrellisNode& node = beams[d][best.ids()[i] % p.nodes];
    place_of[best.ids()[i]] = static_cast<int32_t>(i);
    p.out_tokens[at] = target_id(p, p.topk_ids[(b * p.depth + d) * p.k + node.candidate]);
    if (d > 0) p.out_parents[at] = place_of[(d - 1) * p.nodes + node.parent];
    p.out_scores[at] = node.score;
  }
}

}  // namespace

void expand_trellis_cpu(const ExpandTrellisParams& p) {
  with_float_type(p.factor_dtype, [&]<class T>() {
    for (int64_t b = 0; b < p.batch; ++b) expand_row<T>(p, b);
  });
}

}  // namespace specdec::draft
