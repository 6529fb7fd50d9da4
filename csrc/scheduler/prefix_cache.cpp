#include "scheduler/prefix_cache.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace specdec::scheduler {
namespace {

struct Before {
  using is_transparent = void;
  bool operator()(Tokens a, Tokens b) const { return std::ranges::lexicographical_compare(a, b); }
};

}  // namespace

class PrefixCache::Node {
 public:
  Node* parent = nullptr;
  std::vector<int32_t> tokens;  // of its own pages, and `lookahead` after them
  std::vector<int32_t> places;  // of its own pages
  int64_t end = 0;              // pages from the root on
  int64_t locks = 0;            // on it and on those below it
  uint64_t used = 0;            // time of last use
  int32_t snapshot = -1;        // of the state at its end; -1: none
  uint64_t snapshot_used = 0;   // time of that one's last use
  std::map<std::vector<int32_t>, std::unique_ptr<Node>, Before> children;  // by the tokens of their first pages

  int64_t size() const { return static_cast<int64_t>(places.size()); }
  bool is_free_leaf() const { return parent != nullptr && locks == 0 && children.empty(); }
};

PrefixCache::PrefixCache(int64_t num_places, int64_t page_size, int64_t num_snapshots, int64_t lookahead)
    : num_places_(num_places),
      page_size_(page_size),
      num_snapshots_(num_snapshots),
      lookahead_(lookahead),
      free_(num_places),
      root_(std::make_unique<Node>()),
      free_snapshots_(num_snapshots) {
  std::iota(free_.rbegin(), free_.rend(), 0);
  std::iota(free_snapshots_.rbegin(), free_snapshots_.rend(), 0);
}

PrefixCache::~PrefixCache() { clear(); }

int64_t PrefixCache::num_pages(const Node* node) { return node->end; }

std::vector<int32_t> PrefixCache::places(const Node* node) {
  std::vector<int32_t> places(node->end);
  for (; node->parent != nullptr; node = node->parent)
    std::ranges::copy(node->places, places.begin() + node->end - node->size());
  return places;
}

int32_t PrefixCache::snapshot(const Node* node) { return node->snapshot; }

// Returns the node of the longest prefix of the text. Splits a node that only begins like the text.
PrefixCache::Node* PrefixCache::descend(Tokens text, int64_t most_pages) {
  const int64_t most = std::min(most_pages, (std::ssize(text) - lookahead_) / page_size_);
  Node* node = root_.get();
  while (node->end < most) {
    const Tokens rest = text.subspan(node->end * page_size_);
    const auto found = node->children.find(first_key(rest));
    if (found == node->children.end()) break;
    Node* child = found->second.get();
    const int64_t alike = std::ranges::mismatch(child->tokens, rest).in1 - child->tokens.begin();
    const int64_t pages = std::min((alike - lookahead_) / page_size_, most - node->end);
    if (pages < child->size()) return split(child, pages);
    node = child;
  }
  return node;
}

// Inserts a parent with the first pages above this node, which keeps the others, since locks on it mean its end.
PrefixCache::Node* PrefixCache::split(Node* node, int64_t pages) {
  auto& siblings = node->parent->children;
  const auto cut = pages * page_size_;
  auto& owner = siblings.find(first_key(node->tokens))->second;
  auto front = std::make_unique<Node>();
  front->parent = node->parent;
  front->tokens.assign(node->tokens.begin(), node->tokens.begin() + cut + lookahead_);
  front->places.assign(node->places.begin(), node->places.begin() + pages);
  front->end = node->end - node->size() + pages;
  front->locks = node->locks;
  front->used = node->used;
  std::unique_ptr<Node> back = std::exchange(owner, std::move(front));
  node->parent = owner.get();
  node->tokens.erase(node->tokens.begin(), node->tokens.begin() + cut);
  node->places.erase(node->places.begin(), node->places.begin() + pages);
  const auto first = node->tokens.begin();
  owner->children.emplace(std::vector(first, first + page_size_ + lookahead_), std::move(back));
  return owner.get();
}

PrefixCache::Node* PrefixCache::find(Tokens text, int64_t most_pages) {
  Node* node = descend(text, most_pages);
  touch(node);
  return node;
}

PrefixCache::Node* PrefixCache::find_snapshot(Tokens text, int64_t most_pages) {
  Node* node = descend(text, most_pages);
  while (node->parent != nullptr && node->snapshot < 0) node = node->parent;
  touch(node);
  if (node->snapshot >= 0) {
    snapshots_.erase({node->snapshot_used, node});
    snapshots_.insert({node->snapshot_used = ++clock_, node});
  }
  return node;
}

int32_t PrefixCache::take_snapshot() {
  if (free_snapshots_.empty() && !snapshots_.empty()) evict_snapshot(snapshots_.begin()->second);
  if (free_snapshots_.empty()) return -1;
  const int32_t snapshot = free_snapshots_.back();
  free_snapshots_.pop_back();
  return snapshot;
}

void PrefixCache::keep_snapshot(Tokens text, int64_t pages, int32_t snapshot) {
  Node* node = descend(text, pages);
  if (node->parent == nullptr || node->end != pages || node->snapshot >= 0) return give_back_snapshot(snapshot);
  node->snapshot = snapshot;
  snapshots_.insert({node->snapshot_used = ++clock_, node});
}

// Takes the snapshot of a node, if there is one.
void PrefixCache::evict_snapshot(Node* node) {
  if (node->snapshot < 0) return;
  snapshots_.erase({node->snapshot_used, node});
  give_back_snapshot(std::exchange(node->snapshot, -1));
  ++num_evicted_snapshots_;
}

PrefixCache::Node* PrefixCache::insert(Tokens text, int64_t pages) {
  Node* node = descend(text, pages);
  const int64_t most = std::min(pages, (std::ssize(text) - lookahead_) / page_size_);
  const int64_t count = std::min(most - node->end, std::ssize(free_));
  if (count > 0) {
    const Tokens rest = text.subspan(node->end * page_size_, count * page_size_ + lookahead_);
    auto child = std::make_unique<Node>();
    child->parent = node;
    child->tokens.assign(rest.begin(), rest.end());
    child->places.assign(free_.rbegin(), free_.rbegin() + count);
    child->end = node->end + count;
    free_.resize(free_.size() - count);
    const Tokens key = first_key(rest);
    auto& owner = node->children[std::vector(key.begin(), key.end())];
    owner = std::move(child);
    node = owner.get();
  }
  touch(node);
  return node;
}

void PrefixCache::lock(Node* node) {
  for (; node->parent != nullptr; node = node->parent) {
    if (node->locks++ == 0) num_locked_ += node->size();
    enlist(node);
  }
}

void PrefixCache::unlock(Node* node) {
  for (; node->parent != nullptr; node = node->parent) {
    if (--node->locks == 0) num_locked_ -= node->size();
    enlist(node);
  }
}

std::vector<int32_t> PrefixCache::evict(int64_t count) {
  std::vector<int32_t> gone;
  while (std::ssize(gone) < count && !leaves_.empty()) {
    Node* leaf = leaves_.begin()->second;
    evict_snapshot(leaf);
    const int64_t kept = std::max<int64_t>(leaf->size() - (count - std::ssize(gone)), 0);
    gone.insert(gone.end(), leaf->places.rbegin(), leaf->places.rend() - kept);
    leaf->end -= leaf->size() - kept;
    leaf->places.resize(kept);
    if (kept > 0) {
      leaf->tokens.resize(kept * page_size_ + lookahead_);
      continue;
    }
    leaves_.erase(leaves_.begin());
    Node* parent = leaf->parent;
    parent->children.erase(parent->children.find(first_key(leaf->tokens)));
    enlist(parent);
  }
  free_.insert(free_.end(), gone.begin(), gone.end());
  return gone;
}

std::vector<int32_t> PrefixCache::clear() {
  std::vector<int32_t> gone;
  // A text may be split into as many nodes as it has pages: their destructors must not nest.
  std::vector<std::unique_ptr<Node>> nodes;
  nodes.push_back(std::exchange(root_, std::make_unique<Node>()));
  while (!nodes.empty()) {
    const std::unique_ptr<Node> node = std::move(nodes.back());
    nodes.pop_back();
    gone.insert(gone.end(), node->places.begin(), node->places.end());
    if (node->snapshot >= 0) give_back_snapshot(node->snapshot);
    for (auto& [key, child] : node->children) nodes.push_back(std::move(child));
  }
  leaves_.clear();
  snapshots_.clear();
  num_locked_ = 0;
  free_.insert(free_.end(), gone.begin(), gone.end());
  return gone;
}

// Marks a prefix, and those that it begins with, as used.
void PrefixCache::touch(Node* node) {
  for (; node->parent != nullptr; node = node->parent) {
    leaves_.erase({node->used, node});
    node->used = ++clock_;
    enlist(node);
  }
}

// Updates the entry of a node in `leaves_`.
void PrefixCache::enlist(Node* node) {
  if (node->is_free_leaf())
    leaves_.insert({node->used, node});
  else
    leaves_.erase({node->used, node});
}

}  // namespace specdec::scheduler
