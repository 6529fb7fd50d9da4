// From the parents of a drafted tree to everything else a tree row carries.
#pragma once

#include <algorithm>
#include <cstdint>

namespace specdec {

// One row of the outputs. tokens and parents of the first `used` nodes are given; parents come before children and
// siblings best first.
struct TreeRow {
  int32_t* tokens;  // [num_nodes], as are the next four
  int32_t* parents;
  int32_t* positions;
  int32_t* first_child;
  int32_t* next_sibling;
  int64_t* mask;  // [num_nodes, words]
  int64_t num_nodes, words;
};

// Fills the row; unused nodes carry `root`, position `seq_len`, their own bit and no links.
inline void finish_tree_row(const TreeRow& t, int64_t used, int32_t root, int32_t seq_len) {
  std::fill_n(t.tokens + used, t.num_nodes - used, root);
  std::fill_n(t.parents + used, t.num_nodes - used, -1);
  std::fill_n(t.positions, t.num_nodes, seq_len);
  std::fill_n(t.first_child, t.num_nodes, -1);
  std::fill_n(t.next_sibling, t.num_nodes, -1);
  std::fill_n(t.mask, t.num_nodes * t.words, 0);
  int32_t last_child[256];
  for (int64_t i = 0; i < t.num_nodes; ++i) {
    int64_t* mask = t.mask + i * t.words;
    last_child[i] = -1;
    if (i > 0 && i < used) {
      const int32_t parent = t.parents[i];
      std::copy_n(t.mask + parent * t.words, t.words, mask);
      // Through unsigned: a position beyond int32 is the caller's, and must not be undefined here.
      t.positions[i] = static_cast<int32_t>(static_cast<uint32_t>(t.positions[parent]) + 1);
      (last_child[parent] < 0 ? t.first_child[parent] : t.next_sibling[last_child[parent]]) = static_cast<int32_t>(i);
      last_child[parent] = static_cast<int32_t>(i);
    }
    mask[i / 64] = static_cast<int64_t>(static_cast<uint64_t>(mask[i / 64]) | uint64_t{1} << (i % 64));
  }
}

}  // namespace specdec
