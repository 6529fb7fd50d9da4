// Parallel append. One thread writes the tokens, which is little work. Then threads take pieces of the text, hash them
// and sort their updates by partition of the table; then they take partitions and apply each one's updates in order.
// Only one thread touches a partition's sets, and an update depends only on its set, so the order of partitions does
// not matter.
#include "ngram/bulk_append.h"

#include <algorithm>
#include <atomic>

#include "ngram/append.h"

namespace specdec::ngram {

void NgramBulk::append(const NgramView& v, const int32_t* tokens, int count, NgramSlot& stream, WorkerPool& workers) {
  const uint32_t start = stream.length, scope = stream.scope;
  ngram_write(v, tokens, count, stream, window_.data(), positions_.data());
  const int pieces = (count + kPiece - 1) / kPiece;
  workers.run(pieces, [&](int64_t i) {
    const int piece = static_cast<int>(i);
    hash(v, piece, piece * kPiece, std::min(count, (piece + 1) * kPiece), start, scope);
  });
  workers.run(kParts, [&](int64_t part) { update(v, static_cast<int>(part), pieces); });
}

void NgramBulk::hash(const NgramView& v, int piece, int begin, int end, uint32_t start, uint32_t scope) {
  Update unsorted[kPiece * kNgramOrders];
  int count = 0, next[kParts] = {};
  const auto part_of = [&](uint32_t set) { return static_cast<int>(uint64_t{set} * kParts / v.num_sets); };
  for (int i = begin; i < end; ++i) {
    uint64_t keys[kNgramOrders];
    ngram_keys(scope, [&](int n) { return window_[kNgramMaxOrder + i - n]; }, keys);
    for (int order = 0; order < kNgramOrders && start + i >= 1u << order; ++order) {
      const Update update{ngram_set_of(v, keys[order]), ngram_tag(keys[order]), positions_[i]};
      ++next[part_of(update.set)];
      unsorted[count++] = update;
    }
  }
  int at = begin_[piece][0] = begin * kNgramOrders;
  for (int part = 0; part < kParts; ++part) {
    at += next[part];
    next[part] = begin_[piece][part];
    begin_[piece][part + 1] = at;
  }
  for (int i = 0; i < count; ++i) updates_[next[part_of(unsorted[i].set)]++] = unsorted[i];
}

void NgramBulk::update(const NgramView& v, int part, int pieces) const {
  uint64_t entries = 0, evictions = 0;
  for (int piece = 0; piece < pieces; ++piece) {
    const Update *begin = &updates_[begin_[piece][part]], *end = begin + begin_[piece][part + 1] - begin_[piece][part];
    for (const Update* u = begin; u < end; ++u) ngram_prefetch(v.sets + u->set);
    for (const Update* u = begin; u < end; ++u) ngram_prefetch_older(v.sets[u->set], u->tag);
    for (const Update* u = begin; u < end; ++u)
      ngram_update(v, v.sets[u->set], u->tag, u->position, entries, evictions);
  }
  std::atomic_ref(v.header->entries).fetch_add(entries, std::memory_order_relaxed);
  std::atomic_ref(v.header->evictions).fetch_add(evictions, std::memory_order_relaxed);
}

}  // namespace specdec::ngram
