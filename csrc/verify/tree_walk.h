// The walk down one tree, the same on both devices: bounded, and in bounds whatever the links say.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/slots.h"

namespace specdec {

struct TreeLinks {
  const int32_t* tokens;        // [batch, num_nodes]
  const int32_t* parents;       // [batch, num_nodes], -1 at the root
  const int32_t* first_child;   // [batch, num_nodes], -1 for none
  const int32_t* next_sibling;  // [batch, num_nodes], -1 for none
  int64_t num_nodes;
};

constexpr int32_t kNoChild = -1, kMalformed = -2;

// The first child of `node` in request b's tree that carries `token`, or kNoChild; kMalformed at the first link that
// leaves the tree, does not rise, or leads to a node with another parent. Rising links bound the loop by `size`.
SD_HD int32_t find_child(const TreeLinks& t, int64_t b, int32_t size, int32_t node, int32_t token) {
  const int64_t base = b * t.num_nodes;
  int32_t before = node;
  int32_t child = t.first_child[base + node];
  while (child != -1) {
    if (child <= before || child >= size || t.parents[base + child] != node) return kMalformed;
    if (t.tokens[base + child] == token) return child;
    before = child;
    child = t.next_sibling[base + child];
  }
  return kNoChild;
}

// One request's walk. The caller finds the target's token at `node` and calls step() with it until that returns false,
// then pads what was emitted with finish().
struct TreeWalk {
  TreeLinks links;
  int64_t b;
  int32_t size;  // nodes in use
  int64_t accept_width;
  int32_t* out_tokens;  // this request's row
  int32_t* out_path;
  int32_t node = 0;
  int64_t len = 0;   // tokens emitted
  int32_t bits = 0;  // for the slot's status

  SD_HD TreeWalk(const TreeLinks& tree, int64_t row, int32_t claimed_size, int64_t width, int32_t* tokens,
                 int32_t* path)
      : links(tree), b(row), size(claimed_size), accept_width(width), out_tokens(tokens), out_path(path) {
    if (size > links.num_nodes) {  // no telling which nodes are meant: the root alone
      size = 1;
      bits = kBadTree;
    }
  }

  // Emits the target's token at `node` (-1: its logits have nothing to choose from) and goes to the child carrying it.
  SD_HD bool step(int32_t token) {
    if (token < 0) {
      bits |= kBadLogits;
      return false;
    }
    out_tokens[len] = token;
    out_path[len] = node;
    if (++len == accept_width) return false;
    const int32_t child = find_child(links, b, size, node, token);
    if (child == kMalformed) bits |= kBadTree;
    if (child < 0) return false;
    node = child;
    return true;
  }

  SD_HD void finish() {
    const int32_t last = len > 0 ? out_path[len - 1] : 0;
    for (int64_t j = len; j < accept_width; ++j) {
      out_tokens[j] = -1;
      out_path[j] = last;
    }
  }
};

}  // namespace specdec
