// Which prefixes of texts have their KV in pages that nobody runs on: a radix tree whose edges are whole pages.
//
// A page stands for its own tokens and for the one behind them, which the last row of a draft head in it has read
// (round.md, section 8). The tree does not know pages of the pool, but places, in which the device keeps them: places
// are given away here, and taken back with the pages that are let go of.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "scheduler/executor.h"

namespace specdec::scheduler {

class PrefixCache {
 public:
  // A prefix, from the root on. Its pages stay while anybody has locked it or one that it begins.
  class Node;

  // With 0 places nothing is ever cached.
  PrefixCache(int64_t num_places, int64_t page_size);
  ~PrefixCache();

  // The longest cached prefix of a text, of `most_pages` at most. Valid until the next call, unless it is locked.
  Node* find(Tokens text, int64_t most_pages);
  // Adds what is missing of the text's first pages, as far as there are places; as find otherwise.
  Node* insert(Tokens text, int64_t pages);
  void lock(Node* node);
  void unlock(Node* node);

  // Pages of a prefix, and where they are.
  static int64_t num_pages(const Node* node);
  static std::vector<int32_t> places(const Node* node);

  // Lets go of `count` pages, or of all that nobody has locked, and returns their places: last pages of prefixes that
  // begin no other, those first that were not used for the longest time.
  std::vector<int32_t> evict(int64_t count);
  // Lets go of everything, locks included: no node is valid any more.
  std::vector<int32_t> clear();

  int64_t num_places() const { return num_places_; }
  int64_t size() const { return num_places_ - static_cast<int64_t>(free_.size()); }
  int64_t num_locked() const { return num_locked_; }

 private:
  Node* descend(Tokens text, int64_t most_pages);
  Node* split(Node* node, int64_t pages);
  void touch(Node* node);
  void enlist(Node* node);

  const int64_t num_places_, page_size_;
  std::vector<int32_t> free_;  // places, the next one to give away at the back
  std::unique_ptr<Node> root_;
  std::set<std::pair<uint64_t, Node*>> leaves_;  // that nobody has locked, by when they were used
  uint64_t clock_ = 0;
  int64_t num_locked_ = 0;  // pages
};

}  // namespace specdec::scheduler
