// merge_trees: merge two draft trees of the same request and keep the best nodes.
//
// Candidates are indexed across both trees: index i is node i + 1 of `a`; index a.nodes - 1 + i is node i + 1 of `b`.
// Two nodes are the same if the tokens on their paths are. The first of equal nodes represents all, with their best
// score; then a parent scores at least as much as its children and has a lower index, so the best nodes, with ties to
// the lower index, form a tree with parents first.
//
// Paths are compared by a 64-bit hash. If two paths ever collide, a node is lost and its children attach to another
// one: still a tree.
#pragma once

#include <cmath>

#include "core/dispatch.h"
#include "core/host_device.h"
#include "tree/tree_rows.h"

namespace specdec::tree {

struct ScoredTree {
  const int32_t* tokens;     // [batch, nodes]
  const int32_t* parents;    // [batch, nodes]
  const int32_t* positions;  // [batch, nodes]
  const int32_t* num_nodes;  // [batch]
  const float* scores;       // [batch, nodes]
  int64_t nodes;
};

struct MergeTreesParams {
  ScoredTree a, b;
  TreeOut out;
  float* out_scores;  // [batch, nodes]
  int64_t batch;
};

// One row of a tree, in place or copied.
struct ScoredRow {
  const int32_t* tokens;
  const int32_t* parents;
  const float* scores;
  int32_t count;
  int32_t position;  // of the root

  SD_HD int32_t root() const { return tokens[0]; }
};

SD_HD ScoredRow scored_row(const ScoredTree& t, int64_t row) {
  const int64_t at = row * t.nodes;
  const int32_t count = clamp_to(t.num_nodes[row], 0, static_cast<int32_t>(t.nodes));
  return {t.tokens + at, t.parents + at, t.scores + at, count, count > 0 ? t.positions[at] : 0};
}

// A node's path hash and the lowest score on its path; 0 and -inf if it is no candidate.
struct PathNode {
  uint64_t path;
  float score;
};

SD_HD PathNode path_node(const ScoredRow& row, int32_t node) {
  PathNode found{0x9e3779b97f4a7c15ull, INFINITY};
  while (node > 0) {
    const float score = row.scores[node] + 0.0f;  // -0 becomes 0
    if (!(score >= found.score)) found.score = score == score ? score : -INFINITY;
    found.path = (found.path ^ static_cast<uint32_t>(row.tokens[node])) * 0xff51afd7ed558ccdull;
    found.path ^= found.path >> 32;
    const int32_t parent = row.parents[node];
    if (parent < 0 || parent >= node) found.score = -INFINITY;  // malformed
    node = parent < node ? parent : 0;
  }
  found.path = found.score > -INFINITY ? found.path | 1 : 0;
  return found;
}

// The rows of both trees. `b` counts only if its root equals `a`'s, and stands alone if `a` is empty.
struct RowPair {
  ScoredRow a, b;

  SD_HD int32_t num_from_a() const { return a.count > 0 ? a.count - 1 : 0; }
  SD_HD int32_t candidates() const { return num_from_a() + (b.count > 0 ? b.count - 1 : 0); }
  SD_HD bool is_from_a(int32_t index) const { return index < num_from_a(); }
  SD_HD const ScoredRow& row_of(int32_t index) const { return is_from_a(index) ? a : b; }
  SD_HD int32_t node_of(int32_t index) const { return 1 + (is_from_a(index) ? index : index - num_from_a()); }
  // Return the index of a candidate's parent, or -1 for the root.
  SD_HD int32_t parent_of(int32_t index) const {
    const int32_t parent = row_of(index).parents[node_of(index)];
    return parent == 0 ? -1 : parent - 1 + (is_from_a(index) ? 0 : num_from_a());
  }
  SD_HD TreeHead head() const {
    const ScoredRow& row = a.count > 0 ? a : b;
    TreeHead head;
    if (row.count > 0) head = {.count = 1, .root_token = row.root(), .seq_len = row.position};
    return head;
  }
};

SD_HD RowPair row_pair(const MergeTreesParams& p, int64_t row) {
  RowPair pair{scored_row(p.a, row), scored_row(p.b, row)};
  if (pair.a.count > 0 && pair.b.count > 0 && pair.a.root() != pair.b.root()) pair.b.count = 0;
  return pair;
}

void merge_trees(CallStream stream, const TensorView& a_tokens, const TensorView& a_parents,
                 const TensorView& a_positions, const TensorView& a_num_nodes, const TensorView& a_scores,
                 const TensorView& b_tokens, const TensorView& b_parents, const TensorView& b_positions,
                 const TensorView& b_num_nodes, const TensorView& b_scores, int64_t num_nodes,
                 const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
                 const TensorView& out_first_child, const TensorView& out_next_sibling, const TensorView& out_mask,
                 const TensorView& out_num_nodes, const TensorView& out_scores);

void merge_trees_cpu(const MergeTreesParams& p);
void merge_trees_cuda(const MergeTreesParams& p, Stream stream);

}  // namespace specdec::tree
