// Outputs that all tree builders share, and their layout.
//
// A builder determines the tokens and parents of a row's nodes (parents before children, node 0 is the root); the rest
// follows from these. write_row does it on the CPU, node by node; tree_nodes.cuh does it on the GPU, one thread per
// node.
#pragma once

#include <cstdint>

#include "core/check.h"

namespace specdec::tree {

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

// Values shared by the nodes of a row. Unused nodes carry the root's token and position; an empty row has count 0 and
// zeros.
struct TreeHead {
  int32_t count = 0;
  int32_t root_token = 0;
  int64_t seq_len = 0;
};

struct TreeRow : TreeHead {
  const int32_t* tokens;   // [count]
  const int32_t* parents;  // [count]
};

// Write row b of every output.
void write_row(const TreeOut& out, int64_t b, const TreeRow& row);

// Names of the seven outputs in error messages.
struct TreeNames {
  const char *tokens, *parents, *positions, *first_child, *next_sibling, *mask, *num_nodes;
};
inline constexpr TreeNames kOutTree{"out.tokens",       "out.parents", "out.positions", "out.first_child",
                                    "out.next_sibling", "out.mask",    "out.num_nodes"};

// Check the seven outputs in order; `nodes` is bound and within 1 to kMaxTreeNodes.
TreeOut check_tree_out(Check& check, const TreeNames& names, Dim& batch, Dim& nodes, const TensorView& out_tokens,
                       const TensorView& out_parents, const TensorView& out_positions,
                       const TensorView& out_first_child, const TensorView& out_next_sibling,
                       const TensorView& out_mask, const TensorView& out_num_nodes);

}  // namespace specdec::tree
