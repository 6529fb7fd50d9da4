// expand_trellis: find the best nodes of a trellis, which a block drafter yields in one forward pass.
//
// Position d of the trellis is depth d + 1 of the tree. A node is a path through the trellis; its score is the sum of
// the log-probabilities along it. Level by level, the best nodes of a depth have their parents among the best of the
// depth before: of N nodes in all, no more than N - d are at position d, since each has d ancestors. So a beam of N - d
// nodes loses nothing, and the N best of all beams are the N best nodes.
//
// Nodes are ordered by score, then depth, then rank within their depth, where equal scores go to the better parent and
// then to the better candidate. This order does not depend on N, and an ancestor comes before its descendants.
#pragma once

#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/host_device.h"
#include "draft/calibration.h"
#include "draft/candidates.h"

namespace specdec::draft {

constexpr int64_t kMaxTrellisDepth = 16, kMaxTrellisNodes = 256, kMaxTransitionRank = 4096;

struct ExpandTrellisParams {
  const int32_t* topk_ids;     // [batch, depth, k], draft ids
  const float* topk_logprobs;  // [batch, depth, k]
  Dtypes factor_dtype;         // of predecessors, successors and gates
  const void* predecessors;    // [predecessor_rows, rank], [batch, depth, k, rank] if it has a row for each, or null
  const void* successors;      // [successor_rows, rank]
  const void* gates;           // [batch, depth, rank] or null
  const int32_t* root_tokens;  // [batch] or null
  const int32_t* id_map;       // [successor_rows] or null: draft id -> target id
  const float* calibration;    // [depths, 2] or null
  int32_t* out_tokens;         // [batch, nodes]
  int32_t* out_parents;        // [batch, nodes], -1: child of the root
  float* out_scores;           // [batch, nodes], best first; -inf: no node
  int64_t batch, depth, k, rank, predecessor_rows, successor_rows, id_map_rows, nodes, width, depths;
  bool has_predecessor_rows;  // predecessors have a row for each candidate
};

// Return the target's id of a draft id; an id that the map does not have stays.
SD_HD int32_t target_id(const ExpandTrellisParams& p, int32_t id) {
  return p.id_map && id >= 0 && id < p.id_map_rows ? p.id_map[id] : id;
}

// Return row `row` of a table of factors, or null if it has no such row: the factor is zero there.
template <class T>
SD_HD const T* factor_row(const void* table, int64_t row, int64_t rows, int64_t rank) {
  return row >= 0 && row < rows ? static_cast<const T*>(table) + row * rank : nullptr;
}

// Return the factor of candidate c of position d - 1 (of the root for d = 0) for the transitions to position d.
template <class T>
SD_HD const T* predecessor_row(const ExpandTrellisParams& p, int64_t b, int64_t d, int64_t c) {
  if (p.has_predecessor_rows)
    return static_cast<const T*>(p.predecessors) + ((b * p.depth + d) * p.k + (d == 0 ? 0 : c)) * p.rank;
  const int32_t token = d == 0 ? p.root_tokens[b] : target_id(p, p.topk_ids[(b * p.depth + d - 1) * p.k + c]);
  return factor_row<T>(p.predecessors, token, p.predecessor_rows, p.rank);
}

// Return the factor of candidate c of position d as a successor.
template <class T>
SD_HD const T* successor_row(const ExpandTrellisParams& p, int64_t b, int64_t d, int64_t c) {
  return factor_row<T>(p.successors, p.topk_ids[(b * p.depth + d) * p.k + c], p.successor_rows, p.rank);
}

// Return the gate of position d, which multiplies the predecessors' factors, or null.
template <class T>
SD_HD const T* gate_row(const ExpandTrellisParams& p, int64_t b, int64_t d) {
  return p.gates ? static_cast<const T*>(p.gates) + (b * p.depth + d) * p.rank : nullptr;
}

// Return a log-probability that counts: NaN is -inf, and none is above 0.
SD_HD float valid_logprob(float x) { return x == x ? (x < 0 ? x : 0.0f) : -INFINITY; }

// Return the logit of a transition: the unary log-probability plus the transition's score; NaN is -inf.
SD_HD float transition_logit(float unary, float transition) {
  const float x = add(unary, transition);
  return x == x && unary > -INFINITY ? x : -INFINITY;
}

// Return the log-probability of all tokens that are not among the candidates, whose weights (`weight_of`) have this
// sum. Transitions leave these tokens where they are.
SD_HD float rest_logprob(uint64_t weights) {
  constexpr uint64_t kOne = uint64_t{1} << kWeightBits;
  return weights < kOne ? mul(kLn2, log2_of(sum_of(kOne - weights))) : -INFINITY;
}

// The normaliser of a row of transition logits, by its largest entry and the sum of exp2_weight of the others below it.
// The rest (`rest_logprob`) counts among both.
SD_HD uint64_t transition_weight(float logit, float max) { return exp2_weight(mul(below_max(logit, max), kLog2e)); }
SD_HD float log_of_weights(uint64_t weights) { return weights > 0 ? mul(kLn2, log2_of(sum_of(weights))) : 0.0f; }

// Return log p of a transition, given its row's largest logit and the log of its weights.
SD_HD float transition_logprob(float logit, float max, float log_weights) {
  if (!(logit > -INFINITY)) return -INFINITY;
  const float x = sub(below_max(logit, max), log_weights);
  return x < 0 ? x : 0.0f;
}

void expand_trellis(CallStream stream, const TensorView& topk_ids, const TensorView& topk_logprobs,
                    int64_t num_candidates, const OptTensor& predecessors, const OptTensor& successors,
                    const OptTensor& gates, const OptTensor& root_tokens, const OptTensor& id_map,
                    const OptTensor& calibration, int64_t width, const TensorView& out_tokens,
                    const TensorView& out_parents, const TensorView& out_scores);

void expand_trellis_cpu(const ExpandTrellisParams& p);
void expand_trellis_cuda(const ExpandTrellisParams& p, Stream stream);

}  // namespace specdec::draft
