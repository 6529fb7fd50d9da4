// The outputs every tree builder has, and the functions that write them, the same on both devices.
//
// A builder settles the parents of a row's nodes (parents before children, node 0 the root), then writes each node
// by itself: walks over `parents` go to strictly lower nodes, so they end.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/host_device.h"
#include "draft/candidates.h"

namespace specdec {

constexpr int64_t kMaxTreeNodes = 256;

struct TreeOut {
  int32_t* tokens;        // [batch, nodes]
  int32_t* parents;       // [batch, nodes], -1: none
  int32_t* positions;     // [batch, nodes], seq_len + depth
  int32_t* first_child;   // [batch, nodes], -1: none
  int32_t* next_sibling;  // [batch, nodes], -1: none
  int64_t* mask;          // [batch, nodes, words], bit j of row i: node j is i or an ancestor of i
  int32_t* num_nodes;     // [batch]
  int64_t nodes, words;
};

// One row of a batch. `parents` has `count` nodes; count 0 is an empty row.
struct TreeRow {
  const int32_t* parents;
  int32_t count;
  int32_t root_token;
  int64_t seq_len;
};

SD_HD int32_t depth_of(const TreeRow& row, int32_t i) {
  int32_t depth = 0;
  for (; i > 0; i = row.parents[i]) ++depth;
  return depth;
}

// Word w of node i's mask.
SD_HD uint64_t mask_word(const TreeRow& row, int32_t i, int64_t w) {
  uint64_t bits = 0;
  for (; i >= 0; i = row.parents[i]) bits |= own_bit(i, w);
  return bits;
}

// The first node from `from` on whose parent is `parent`, or -1.
SD_HD int32_t next_child(const TreeRow& row, int32_t parent, int32_t from) {
  for (int32_t j = from; j < row.count; ++j)
    if (row.parents[j] == parent) return j;
  return -1;
}

// Writes node i of row b. `token` is that of a node below `count`; nodes beyond are unused and carry the root's.
SD_HD void write_node(const TreeOut& out, int64_t b, int32_t i, const TreeRow& row, int32_t token) {
  const int64_t at = b * out.nodes + i;
  const bool used = i < row.count;
  out.tokens[at] = used ? token : row.root_token;
  out.parents[at] = used ? row.parents[i] : -1;
  out.positions[at] = static_cast<int32_t>(row.seq_len + (used ? depth_of(row, i) : 0));
  out.first_child[at] = used ? next_child(row, i, i + 1) : -1;
  out.next_sibling[at] = used && i > 0 ? next_child(row, row.parents[i], i + 1) : -1;
  for (int64_t w = 0; w < out.words; ++w)
    out.mask[at * out.words + w] = static_cast<int64_t>(used ? mask_word(row, i, w) : own_bit(i, w));
  if (i == 0) out.num_nodes[b] = row.count;
}

// Checks the seven outputs in order; `nodes` is bound and within 1 to kMaxTreeNodes.
TreeOut check_tree_out(Check& check, Dim& batch, Dim& nodes, const TensorView& out_tokens,
                       const TensorView& out_parents, const TensorView& out_positions,
                       const TensorView& out_first_child, const TensorView& out_next_sibling,
                       const TensorView& out_mask, const TensorView& out_num_nodes);

}  // namespace specdec
