// pack_trees: truncate trees to their first nodes, in place, and write these nodes as packed rows.
#pragma once

#include <cmath>

#include "core/bits.h"
#include "core/dispatch.h"
#include "core/host_device.h"
#include "core/packed_rows.h"
#include "tree/tree_rows.h"

namespace specdec::tree {

struct PackTreesParams {
  TreeOut tree;               // [batch, nodes], changed in place
  const float* scores;        // [batch, nodes]
  const int32_t* num_nodes;   // [batch]: nodes to keep
  const int32_t* cu_seqlens;  // [batch + 1]: request b has rows cu[b] to cu[b + 1] - 1
  int32_t* out_tokens;        // [num_rows]
  int32_t* out_positions;     // [num_rows]
  int64_t* out_mask;          // [num_rows, words]
  float* out_scores;          // [num_rows]
  int64_t batch, num_rows;
};

// Return the number of nodes of request b to keep, at most those that it has.
SD_HD int32_t num_kept(const PackTreesParams& p, int64_t b) {
  const int32_t there = clamp_to(p.tree.num_nodes[b], 0, static_cast<int32_t>(p.tree.nodes));
  return clamp_to(p.num_nodes[b], 0, there);
}

// Write a packed row: a kept node of its request, or an unused row. It reads only elements of a tree that cut_node does
// not change, and num_kept gives the same result before and after its request's count changes, so rows and cuts may run
// in any order.
SD_HD void pack_row(const PackTreesParams& p, int64_t row) {
  const TreeOut& t = p.tree;
  const int64_t b = request_of_row(p.cu_seqlens, p.batch, row), i = b < 0 ? 0 : row - p.cu_seqlens[b];
  const bool is_node = b >= 0 && i < num_kept(p, b);
  const int64_t at = is_node ? b * t.nodes + i : 0;
  p.out_tokens[row] = is_node ? t.tokens[at] : 0;
  p.out_positions[row] = is_node ? t.positions[at] : 0;
  for (int64_t w = 0; w < t.words; ++w) p.out_mask[row * t.words + w] = is_node ? t.mask[at * t.words + w] : 0;
  p.out_scores[row] = is_node ? p.scores[at] : -INFINITY;
}

// Update node i of request b, which keeps `kept` nodes. Parents come before children and links increase, so a link to a
// removed node ends its list. Other nodes' elements are not read except the root's, which stay unless all nodes go: its
// token and position come from the caller.
SD_HD void cut_node(const PackTreesParams& p, int64_t b, int32_t i, int32_t kept, int32_t root_token,
                    int32_t root_position) {
  const TreeOut& t = p.tree;
  const int64_t at = b * t.nodes + i;
  if (i < kept) {
    if (t.first_child[at] >= kept) t.first_child[at] = -1;
    if (t.next_sibling[at] >= kept) t.next_sibling[at] = -1;
    return;
  }
  t.tokens[at] = kept > 0 ? root_token : 0;
  t.positions[at] = kept > 0 ? root_position : 0;
  t.parents[at] = t.first_child[at] = t.next_sibling[at] = -1;
  for (int64_t w = 0; w < t.words; ++w) t.mask[at * t.words + w] = static_cast<int64_t>(own_bit(i, w));
}

void pack_trees(CallStream stream, const TensorView& tokens, const TensorView& parents, const TensorView& positions,
                const TensorView& first_child, const TensorView& next_sibling, const TensorView& mask,
                const TensorView& num_nodes, const TensorView& scores, const TensorView& kept,
                const TensorView& cu_seqlens, int64_t num_rows, const TensorView& out_tokens,
                const TensorView& out_positions, const TensorView& out_mask, const TensorView& out_scores);

void pack_trees_cpu(const PackTreesParams& p);
void pack_trees_cuda(const PackTreesParams& p, Stream stream);

}  // namespace specdec::tree
