// build_tree: select a draft's best candidates as a tree, and write its links, mask and positions, in one launch.
//
// Reads candidates (token, parent, score) and the root token and length by slot. Writes tree rows (tree_rows.h) and
// optionally the nodes' scores.
#pragma once

#include <cmath>
#include <string>

#include "core/dispatch.h"
#include "core/slots.h"
#include "tree/tree_rows.h"

namespace specdec::tree {

struct BuildTreeParams {
  const int32_t* cand_tokens;   // [batch, candidates]
  const int32_t* cand_parents;  // [batch, candidates], -1: child of the root
  const float* cand_scores;     // [batch, candidates], -inf: no candidate
  const int32_t* root_tokens;   // [num_slots]
  const int32_t* seq_lens;      // [num_slots]
  const int32_t* slots;         // [batch] or null
  bool given_order;             // order nodes as the candidates rather than best first
  int32_t* status;              // [num_slots] or null
  TreeOut out;
  float* out_scores;  // [batch, nodes] or null
  int64_t batch, num_slots, candidates;
};

// Candidates of one row. Those connected to the root form a tree: sorted by `rank_score` (descending, then index
// ascending), every parent comes before its children, for any N.
struct CandidateRow {
  const int32_t* tokens;
  const int32_t* parents;
  const float* scores;
  bool given_order;

  // Return the sort key of a candidate with this score: -inf if it is no candidate (NaN counts as -inf).
  SD_HD float ranked(float score) const {
    if (!(score > -INFINITY)) return -INFINITY;
    return given_order ? 0.0f : score;
  }
  SD_HD float rank_score(int64_t c) const { return ranked(scores[c]); }

  // Return the sort key of candidate c's parent, which is at least c's own unless c is malformed: +inf for the root,
  // -inf if nothing can be the parent.
  SD_HD float rank_above(int64_t c, int32_t parent) const {
    if (parent >= 0 && parent < c) return rank_score(parent);
    return parent == -1 ? INFINITY : -INFINITY;
  }
  SD_HD bool follows_parent(int64_t c) const { return rank_above(c, parents[c]) >= rank_score(c); }

  // Return whether c is connected to the root within `depth` steps. A deeper candidate ranks below `depth` others
  // anyway.
  SD_HD bool reaches_root(int64_t c, int64_t depth) const {
    for (int64_t d = 0; d < depth && follows_parent(c); ++d) {
      if (parents[c] == -1) return true;
      c = parents[c];
    }
    return false;
  }
};

SD_HD CandidateRow candidate_row(const BuildTreeParams& p, int64_t b) {
  const int64_t at = b * p.candidates;
  return {p.cand_tokens + at, p.cand_parents + at, p.cand_scores + at, p.given_order};
}

void build_tree(CallStream stream, const TensorView& cand_tokens, const TensorView& cand_parents,
                const TensorView& cand_scores, const TensorView& root_tokens, const TensorView& seq_lens,
                int64_t num_nodes, const OptTensor& slots, const std::string& order, const OptTensor& status,
                const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
                const TensorView& out_first_child, const TensorView& out_next_sibling, const TensorView& out_mask,
                const TensorView& out_num_nodes, const OptTensor& out_scores);

void build_tree_cpu(const BuildTreeParams& p);
void build_tree_cuda(const BuildTreeParams& p, Stream stream);

}  // namespace specdec::tree
