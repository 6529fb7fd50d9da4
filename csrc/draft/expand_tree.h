// expand_root and expand_tree: one draft step.
//
// Each step appends candidates, selects the best k as the next frontier, and writes the inputs of the next draft
// forward pass (tokens, positions, mask). Candidate order: candidates.h.
#pragma once

#include "core/bits.h"
#include "core/dispatch.h"
#include "core/host_device.h"
#include "core/slots.h"
#include "draft/calibration.h"
#include "draft/candidates.h"

namespace specdec::draft {

struct ExpandRootParams {
  const int32_t* topk_ids;     // [num_slots, k]
  const float* topk_logprobs;  // [num_slots, k]
  const int32_t* seq_lens;     // [num_slots]
  const int32_t* slots;        // [batch] or null
  const float* calibration;    // [depths, 2] or null
  int32_t* out_cand_tokens;    // [batch, candidates]
  int32_t* out_cand_parents;   // [batch, candidates], -1: child of the root
  float* out_cand_scores;      // [batch, candidates], cumulative log-probabilities
  int32_t* out_frontier;       // [batch, k], candidate indices
  int32_t* out_tokens;         // [batch, k]
  int32_t* out_positions;      // [batch, k]
  int64_t* out_mask;           // [batch, k, mask_words], bits over the draft's tail rows
  int64_t batch, num_slots, k, candidates, mask_words, position_offset, depths;
};

struct ExpandTreeParams {
  const int32_t* topk_ids;     // [batch, k, k]: row j has the children of frontier node j
  const float* topk_logprobs;  // [batch, k, k]
  int32_t* cand_tokens;        // [batch, candidates], appended to
  int32_t* cand_parents;       // [batch, candidates], appended to
  float* cand_scores;          // [batch, candidates], appended to
  int32_t* frontier;           // [batch, k], candidate indices, replaced
  int64_t* mask;               // [batch, k, mask_words], replaced
  const int32_t* seq_lens;     // [num_slots]
  const int32_t* slots;        // [batch] or null
  const float* calibration;    // [depths, 2] or null
  int32_t* out_tokens;         // [batch, k]
  int32_t* out_parent_rows;    // [batch, k], in [0, batch * k)
  int32_t* out_positions;      // [batch, k]
  int64_t batch, num_slots, k, candidates, mask_words, position_offset, step, depths;
};

// Write candidate c of row b for step 1: a child of the root, or a column that later steps fill.
SD_HD void write_root_candidate(const ExpandRootParams& p, int64_t b, int64_t slot, int64_t c) {
  const int64_t at = b * p.candidates + c, child = slot * p.k + c;
  const bool filled = slot >= 0 && c < p.k;
  p.out_cand_tokens[at] = filled ? p.topk_ids[child] : 0;
  p.out_cand_parents[at] = -1;
  p.out_cand_scores[at] =
      filled ? child_score(0.0f, calibrated(platt_of(p.calibration, p.depths, 1), p.topk_logprobs[child])) : -INFINITY;
}

// Write frontier node j of row b at depth 1.
SD_HD void write_root_frontier(const ExpandRootParams& p, int64_t b, int64_t slot, int64_t j) {
  const int64_t at = b * p.k + j;
  p.out_frontier[at] = static_cast<int32_t>(j);
  p.out_tokens[at] = slot >= 0 ? p.topk_ids[slot * p.k + j] : 0;
  p.out_positions[at] = slot >= 0 ? static_cast<int32_t>(p.seq_lens[slot] + p.position_offset) : 0;
  for (int64_t w = 0; w < p.mask_words; ++w) p.out_mask[at * p.mask_words + w] = static_cast<int64_t>(own_bit(j, w));
}

struct FrontierNode {
  int32_t candidate;  // -1: none
  float score;
};

// Read frontier node j of row b. An index out of range, and any node of an empty row, is no node: its children score
// -inf.
SD_HD FrontierNode read_frontier(const ExpandTreeParams& p, int64_t b, int64_t slot, int64_t j) {
  const int32_t candidate = p.frontier[b * p.k + j];
  if (slot < 0 || candidate < 0 || candidate >= first_candidate(p.k, p.step)) return {-1, -INFINITY};
  return {candidate, p.cand_scores[b * p.candidates + candidate]};
}

// Child i = (parent's frontier row) * k + rank, as the draft proposed it.
struct Child {
  int32_t token;
  float logprob;
};
SD_HD Child read_child(const ExpandTreeParams& p, int64_t b, int64_t i) {
  const int64_t at = b * p.k * p.k + i;
  return {p.topk_ids[at], p.topk_logprobs[at]};
}

// Append child i and return its score.
SD_HD float append_child(const ExpandTreeParams& p, int64_t b, int64_t slot, FrontierNode parent, int64_t i,
                         Child child) {
  const int64_t at = b * p.candidates + first_candidate(p.k, p.step) + i;
  const float score = child_score(parent.score, calibrated(platt_of(p.calibration, p.depths, p.step), child.logprob));
  p.cand_tokens[at] = slot >= 0 ? child.token : 0;
  p.cand_parents[at] = parent.candidate;
  p.cand_scores[at] = score;
  return score;
}

// Return the RoPE position of a slot's new frontier.
SD_HD int32_t child_position(const ExpandTreeParams& p, int64_t slot) {
  return slot >= 0 ? static_cast<int32_t>(p.seq_lens[slot] + p.step - 1 + p.position_offset) : 0;
}

// Write node j of row b's new frontier, which is child i. The caller writes its mask, which replaces its own input.
SD_HD void write_frontier(const ExpandTreeParams& p, int64_t b, int64_t slot, int64_t j, int32_t i, int32_t position) {
  const int64_t at = b * p.k + j;
  p.frontier[at] = static_cast<int32_t>(first_candidate(p.k, p.step) + i);
  p.out_tokens[at] = slot >= 0 ? p.topk_ids[b * p.k * p.k + i] : 0;
  p.out_parent_rows[at] = static_cast<int32_t>(b * p.k + i / p.k);
  p.out_positions[at] = position;
}

void expand_root(CallStream stream, const TensorView& topk_ids, const TensorView& topk_logprobs,
                 const TensorView& seq_lens, int64_t num_steps, const OptTensor& slots, int64_t position_offset,
                 const OptTensor& calibration, const TensorView& out_cand_tokens, const TensorView& out_cand_parents,
                 const TensorView& out_cand_scores, const TensorView& out_frontier, const TensorView& out_tokens,
                 const TensorView& out_positions, const TensorView& out_mask);

void expand_root_cpu(const ExpandRootParams& p);
void expand_root_cuda(const ExpandRootParams& p, Stream stream);

void expand_tree(CallStream stream, const TensorView& topk_ids, const TensorView& topk_logprobs, int64_t step,
                 const TensorView& cand_tokens, const TensorView& cand_parents, const TensorView& cand_scores,
                 const TensorView& frontier, const TensorView& mask, const TensorView& seq_lens, const OptTensor& slots,
                 int64_t position_offset, const OptTensor& calibration, const TensorView& out_tokens,
                 const TensorView& out_parent_rows, const TensorView& out_positions);

void expand_tree_cpu(const ExpandTreeParams& p);
void expand_tree_cuda(const ExpandTreeParams& p, Stream stream);

}  // namespace specdec::draft
