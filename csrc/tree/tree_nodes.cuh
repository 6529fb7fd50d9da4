// write_row (tree_rows.h) node by node: one thread writes everything about one node, from the parents in shared memory.
// Walks over `parents` go to strictly lower nodes, so they end.
#pragma once

#include "core/bits.h"
#include "core/cuda.cuh"
#include "tree/tree_rows.h"

namespace specdec {

__device__ __forceinline__ int32_t depth_of(const TreeRow& row, int32_t i) {
  int32_t depth = 0;
  for (; i > 0; i = row.parents[i]) ++depth;
  return depth;
}

// Word w of node i's mask.
__device__ __forceinline__ uint64_t mask_word(const TreeRow& row, int32_t i, int64_t w) {
  uint64_t bits = 0;
  for (; i >= 0; i = row.parents[i]) bits |= own_bit(i, w);
  return bits;
}

// The first node from `from` on whose parent is `parent`, or -1.
__device__ __forceinline__ int32_t next_child(const TreeRow& row, int32_t parent, int32_t from) {
  for (int32_t j = from; j < row.count; ++j)
    if (row.parents[j] == parent) return j;
  return -1;
}

// Writes node i of row b, used or not.
__device__ __forceinline__ void write_node(const TreeOut& out, int64_t b, int32_t i, const TreeRow& row) {
  const int64_t at = b * out.nodes + i;
  const bool used = i < row.count;
  out.tokens[at] = used ? row.tokens[i] : row.root_token;
  out.parents[at] = used ? row.parents[i] : -1;
  out.positions[at] = static_cast<int32_t>(row.seq_len + (used ? depth_of(row, i) : 0));
  out.first_child[at] = used ? next_child(row, i, i + 1) : -1;
  out.next_sibling[at] = used && i > 0 ? next_child(row, row.parents[i], i + 1) : -1;
  for (int64_t w = 0; w < out.words; ++w)
    out.mask[at * out.words + w] = static_cast<int64_t>(used ? mask_word(row, i, w) : own_bit(i, w));
  if (i == 0) out.num_nodes[b] = row.count;
}

}  // namespace specdec
