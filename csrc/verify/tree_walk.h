// Links of one tree, checked as they are followed, and the emitted path. Shared by CPU and GPU. Walks are bounded and
// stay in bounds whatever the links say.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/slots.h"

namespace specdec::verify {

struct TreeLinks {
  const int32_t* tokens;        // [batch, num_nodes]
  const int32_t* parents;       // [batch, num_nodes], -1 at the root
  const int32_t* first_child;   // [batch, num_nodes], -1 for none
  const int32_t* next_sibling;  // [batch, num_nodes], -1 for none
  int64_t num_nodes;
};

// Fields of a node that the walk reads, in one load.
struct alignas(16) TreeNode {
  int32_t token, parent, first_child, next_sibling;
};

SD_HD TreeNode read_node(const TreeLinks& t, int64_t b, int64_t i) {
  const int64_t at = b * t.num_nodes + i;
  return {t.tokens[at], t.parents[at], t.first_child[at], t.next_sibling[at]};
}

constexpr int32_t kNoChild = -1, kMalformed = -2;

// Return `child` if it may follow `before` among the children of `node`, else kMalformed: the link leaves the tree,
// does not increase, or leads to a node with another parent. Increasing links bound every walk by `size`.
template <class Nodes>
SD_HD int32_t checked_child(const Nodes& nodes, int32_t size, int32_t node, int32_t before, int32_t child) {
  if (child == kNoChild) return kNoChild;
  return child > before && child < size && nodes(child).parent == node ? child : kMalformed;
}

template <class Nodes>
SD_HD int32_t first_child(const Nodes& nodes, int32_t size, int32_t node) {
  return checked_child(nodes, size, node, node, nodes(node).first_child);
}

// Return the first child of `node`, from `child` on, that carries `token`, or kNoChild; kMalformed at the first bad
// link. nodes(i) is node i.
template <class Nodes>
SD_HD int32_t find_child(const Nodes& nodes, int32_t size, int32_t node, int32_t child, int32_t token) {
  while (child >= 0 && nodes(child).token != token)
    child = checked_child(nodes, size, node, child, nodes(child).next_sibling);
  return child;
}

// Return the number of nodes in use of a tree that claims `claimed`. If it claims more than fit, the nodes are unknown:
// use only the root and set `bits` for the slot's status.
SD_HD int32_t tree_size(int32_t claimed, int64_t num_nodes, int32_t& bits) {
  if (claimed <= num_nodes) return claimed;
  bits |= kBadTree;
  return 1;
}

// One request's emitted tokens. The caller finds the next token and calls emit(); finish() pads at the end.
struct EmittedRow {
  int32_t* tokens;  // [accept_width]
  int32_t* path;    // [accept_width]
  int64_t accept_width;
  int64_t len = 0;
  int32_t last_node = 0;

  // Emit a token; return whether another one fits. Only one thread `writes`; the others of its block only count.
  SD_HD bool emit(int32_t token, int32_t node, bool writes = true) {
    if (writes) {
      tokens[len] = token;
      path[len] = node;
    }
    last_node = node;
    return ++len < accept_width;
  }

  SD_HD void finish() const {
    for (int64_t j = len; j < accept_width; ++j) {
      tokens[j] = -1;
      path[j] = last_node;
    }
  }
};

}  // namespace specdec::verify
