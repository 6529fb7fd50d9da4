// Write a tree row (write_row in tree_rows.h) with one block: one thread per node, from the nodes' parents.
//
// A node's children are a bitset in smem: its first child is the lowest bit of its own set, its next sibling the next
// bit of its parent's set. Ancestors come from pointer doubling: log2(depth) steps for any tree. If the nodes fit a
// warp's lanes this needs no memory; otherwise a few single steps up come first, which mostly suffice.
#pragma once

#include "core/bits.h"
#include "core/cuda.cuh"
#include "tree/tree_rows.h"

namespace specdec::tree {

// smem of a row with up to 64 * kWords nodes.
template <int kWords>
struct TreeNodes {
  static constexpr int kNodes = 64 * kWords;
  int32_t up[kNodes];  // the parent, or the node itself without one
  union {
    uint64_t children[kNodes][kWords];   // bit j of row i: node j is a child of node i
    uint64_t ancestors[kWords][kNodes];  // reused while doubling
  };
};

// Clear the bitsets. Every thread calls this, before a barrier and write_nodes.
template <int kWords>
__device__ __forceinline__ void clear_nodes(TreeNodes<kWords>& s) {
  const unsigned i = threadIdx.x;
  if (i < s.kNodes)
    for (int w = 0; w < kWords; ++w) s.children[i][w] = 0;
}

// Return the lowest set bit above `bit`, or -1.
template <int kWords>
__device__ __forceinline__ int32_t next_bit(const uint64_t (&bits)[kWords], int32_t bit) {
  int32_t found = -1;
#pragma unroll
  for (int w = kWords - 1; w >= 0; --w) {
    uint64_t left = bits[w];
    if (w <= bit / 64) left = w < bit / 64 ? 0 : left & ~uint64_t{1} << bit % 64;
    if (left != 0) found = 64 * w + __ffsll(static_cast<long long>(left)) - 1;
  }
  return found;
}

// Add node i's ancestors to `bits`. Overwrites `children`.
template <int kWords>
__device__ __forceinline__ void find_ancestors(TreeNodes<kWords>& s, int32_t i, int32_t nodes,
                                               uint64_t (&bits)[kWords]) {
  constexpr int kSteps = 6;  // drafts are rarely deeper
  if (nodes <= kWarp) {
    if (i >= kWarp) return;
    int32_t at = i < nodes ? s.up[i] : i;
    uint32_t own = 1u << at;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      own |= __shfl_sync(kFullMask, own, at);
      at = __shfl_sync(kFullMask, at, at);
    }
    bits[0] |= own;
    return;
  }
  int32_t at = i < nodes ? i : 0;
  bool moved = false;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int32_t up = s.up[at];
#pragma unroll
    for (int w = 0; w < kWords; ++w) bits[w] |= own_bit(up, w);
    moved = up != at;
    at = up;
  }
  while (__syncthreads_or(moved)) {  // `bits` has the nodes from i up to `at`
    if (i < nodes) {
      s.up[i] = at;
      for (int w = 0; w < kWords; ++w) s.ancestors[w][i] = bits[w];
    }
    __syncthreads();
    for (int w = 0; w < kWords; ++w) bits[w] |= s.ancestors[w][at];
    const int32_t up = s.up[at];
    moved = up != at;
    at = up;
  }
}

// Write row b of every output; thread i writes node i. Its token and parent count only if the node is used. Every
// thread of the block calls this.
template <int kWords>
__device__ __forceinline__ void write_nodes(const TreeOut& out, int64_t b, const TreeHead& head, int32_t token,
                                            int32_t parent, TreeNodes<kWords>& s) {
  const auto i = static_cast<int32_t>(threadIdx.x), nodes = static_cast<int32_t>(out.nodes);
  const int64_t at = b * out.nodes + i;
  if (i >= head.count) token = head.root_token, parent = -1;
  if (i < nodes) {
    s.up[i] = parent >= 0 ? parent : i;
    out.tokens[at] = token;
    out.parents[at] = parent;
  }
  if (parent >= 0) {  // 32-bit atomics are faster
    auto* half_words = reinterpret_cast<uint32_t*>(s.children[parent]);
    atomicOr(half_words + i / 32, 1u << i % 32);
  }
  if (i == 0) out.num_nodes[b] = head.count;
  __syncthreads();

  if (i < nodes) {
    out.first_child[at] = next_bit(s.children[i], i);
    out.next_sibling[at] = parent >= 0 ? next_bit(s.children[parent], i) : -1;
  }
  uint64_t bits[kWords];
  for (int w = 0; w < kWords; ++w) bits[w] = own_bit(i, w);
  find_ancestors(s, i, nodes, bits);
  if (i >= nodes) return;
  int depth = -1;
  for (int w = 0; w < kWords; ++w) {
    depth += __popcll(bits[w]);
    if (w < out.words) out.mask[at * out.words + w] = static_cast<int64_t>(bits[w]);
  }
  out.positions[at] = static_cast<int32_t>(head.seq_len + depth);
}

}  // namespace specdec::tree
