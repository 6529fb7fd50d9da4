// A radix tree of text prefixes whose KV is cached in pages. Its edges are whole pages.
//
// A page is keyed by its own tokens and the `lookahead` ones after them, which the last row of a draft head in it has
// read (round.md, section 8): one, or as many as MTP layers draft in a chain. The tree does not know pages of the pool,
// only places in which the device keeps them: it assigns places to cached pages, and gets them back when it evicts
// these.
//
// A model with recurrent layers continues a prefix only from the state at its end. The tree then assigns *snapshots*,
// copies of such states that the device keeps, to some prefixes. Evicting a page evicts the snapshots at its end and
// of longer prefixes; a snapshot may be evicted alone.
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
  // A prefix, from the root on. Its pages stay while it, or a prefix that it begins, is locked.
  class Node;

  // Creates an empty cache. With 0 places it never caches anything.
  PrefixCache(int64_t num_places, int64_t page_size, int64_t num_snapshots = 0, int64_t lookahead = 1);
  ~PrefixCache();

  // Returns the longest cached prefix of a text, at most `most_pages` long. Valid until the next call, unless locked.
  Node* find(Tokens text, int64_t most_pages);
  // Returns the longest prefix of that one with a snapshot, which counts as used; else the empty prefix.
  Node* find_snapshot(Tokens text, int64_t most_pages);
  // Adds the missing ones of the text's first pages, as far as there are places, and returns the prefix as find does.
  Node* insert(Tokens text, int64_t pages);
  void lock(Node* node);
  void unlock(Node* node);

  // Returns the number of pages of a prefix, and their places.
  static int64_t num_pages(const Node* node);
  static std::vector<int32_t> places(const Node* node);
  // Returns the snapshot of the state at a prefix's end; -1: none.
  static int32_t snapshot(const Node* node);

  // Takes a snapshot that no prefix has, or the least recently used one of a prefix; -1 if others have taken all.
  int32_t take_snapshot();
  // Gives a taken snapshot to the text's first pages. Gives it back if these are not cached or have one.
  void keep_snapshot(Tokens text, int64_t pages, int32_t snapshot);
  void give_back_snapshot(int32_t snapshot) { free_snapshots_.push_back(snapshot); }

  // Evicts `count` pages, or all that are not locked, and returns their places: last pages of prefixes that begin no
  // other, least recently used first.
  std::vector<int32_t> evict(int64_t count);
  // Evicts everything, locked or not. Invalidates all nodes.
  std::vector<int32_t> clear();

  int64_t num_places() const { return num_places_; }
  int64_t size() const { return num_places_ - static_cast<int64_t>(free_.size()); }
  int64_t num_locked() const { return num_locked_; }
  int64_t num_snapshots() const { return num_snapshots_ - std::ssize(free_snapshots_); }  // that are taken
  int64_t num_evicted_snapshots() const { return num_evicted_snapshots_; }                // so far, without `clear`

 private:
  Node* descend(Tokens text, int64_t most_pages);
  Node* split(Node* node, int64_t pages);
  void touch(Node* node);
  void enlist(Node* node);
  void evict_snapshot(Node* node);

  Tokens first_key(Tokens tokens) const { return tokens.first(page_size_ + lookahead_); }

  const int64_t num_places_, page_size_, num_snapshots_, lookahead_;
  std::vector<int32_t> free_;  // places, the next one last
  std::unique_ptr<Node> root_;
  std::set<std::pair<uint64_t, Node*>> leaves_;     // not locked, least recently used first
  std::vector<int32_t> free_snapshots_;             // the next one last
  std::set<std::pair<uint64_t, Node*>> snapshots_;  // prefixes that have one, by last use of it, oldest first
  int64_t num_evicted_snapshots_ = 0;
  uint64_t clock_ = 0;
  int64_t num_locked_ = 0;  // pages
};

}  // namespace specdec::scheduler
