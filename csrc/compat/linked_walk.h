// The walk down a tree of 64-bit links, and its outputs in the layout of SGLang's verify kernels.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace specdec::compat {

struct VerifyLinks {
  int32_t* predicts;              // [num_predicts], by flat row: the token after it
  int32_t* accept_index;          // [batch, width]: flat rows of the accepted nodes, the root first
  int32_t* accept_token_num;      // [batch]: accepted nodes without the root
  const int64_t* candidates;      // [batch, nodes]: tokens
  const int64_t* retrieve_index;  // [batch, nodes]: flat rows
  int64_t batch, nodes, width, num_predicts;

  SD_HD int64_t flat_row(int64_t b, int64_t node) const { return retrieve_index[b * nodes + node]; }
  SD_HD void keep(int64_t b, int64_t place, int64_t node) const {
    accept_index[b * width + place] = static_cast<int32_t>(flat_row(b, node));
  }
  // Write the token after a node, unless its row is outside `predicts`.
  SD_HD void predict(int64_t b, int64_t node, int64_t token) const {
    const int64_t row = flat_row(b, node);
    if (row >= 0 && row < num_predicts) predicts[row] = static_cast<int32_t>(token);
  }
};

constexpr int64_t kMaxWalkedNodes = 1024;

// Fields of a node that the walk reads.
struct LinkedNode {
  int64_t token;
  int32_t next_token, next_sibling;
};

// Return a link as int32; links outside a tree of kMaxWalkedNodes become -1.
SD_HD int32_t narrow_link(int64_t link) {
  return link >= 0 && link < kMaxWalkedNodes ? static_cast<int32_t>(link) : -1;
}

// Walk from the root while fewer than `width` nodes are accepted and some child is accepted. accepts(node, child,
// token) is called for the children in order, keep(index, node, child, token) for the accepted one. Links must
// increase, which bounds the walk; a link that does not, or that leaves the tree, ends its list. Return the number of
// accepted nodes, and the last one in `node`.
template <class Nodes, class Accepts, class Keep>
SD_HD int64_t walk_links(const Nodes& nodes, int64_t num_nodes, int64_t width, Accepts accepts, Keep keep,
                         int64_t& node) {
  const auto rising = [&](int64_t from, int64_t to) { return to > from && to < num_nodes ? to : -1; };
  node = 0;
  for (int64_t count = 0;; ++count) {
    if (count + 1 >= width) return count;
    int64_t child = rising(node, nodes(node).next_token);
    while (child >= 0 && !accepts(node, child, nodes(child).token)) child = rising(child, nodes(child).next_sibling);
    if (child < 0) return count;
    keep(count + 1, node, child, nodes(child).token);
    node = child;
  }
}

}  // namespace specdec::compat
