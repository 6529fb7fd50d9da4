// The loop's side of the prefix cache: which requests begin with cached pages, which pages are cached, which are
// evicted; and where prefill saves snapshots of recurrent states, without which pages serve nobody.
//
// The device owns the pages; the host names entries of its page table, those of the slots first, then the places of the
// cache. A page is shared once a round that attended to its rows has been read and found them correct, so no shared
// page has a row that was drafted and rejected, or never written.
#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "scheduler/admission.h"
#include "scheduler/scheduler.h"

namespace specdec::scheduler {
namespace {

// Returns the first entry of a slot's row of the page table. The places come after all slots.
int64_t first_entry(const Config& config, int64_t slot) { return slot * pages_for(config, config.max_len); }

// Returns the most pages that a request may share: at least the root's row is left to prefill, for the first token, and
// the tokens after the pages that their keys have.
int64_t most_shared(const Config& config, const Request& request) {
  return std::max<int64_t>(std::ssize(request.text) - config.lookahead, 0) / config.page_size;
}

// Returns the pages of the longest prefix, of at most these pages, after which a prefill of the whole text saves a
// snapshot.
int64_t pages_with_snapshot(const Config& config, const Request& request, int64_t pages) {
  const int64_t last = most_shared(config, request), regular = pages / config.snapshot_pages * config.snapshot_pages;
  if (pages >= last) return last;
  return request.branch <= pages ? std::max(request.branch, regular) : regular;
}

}  // namespace

// Returns whether waiting for a request that is being prefilled would save at least half of this one's prefill, since
// it will share its pages: samples of one prompt that arrive together are prefilled once.
bool Scheduler::waits_for_prefix(const Request& request) const {
  if (!config_.prefix_cache || request.migrated || !request.shares_prefix) return false;
  for (const auto& holder : slots_.holders()) {
    if (holder->num_validated > 0 || !holder->cacheable) continue;
    const auto alike = std::ranges::mismatch(holder->text, request.text).in1 - holder->text.begin();
    int64_t pages = std::min((alike - config_.lookahead) / config_.page_size, most_shared(config_, request));
    if (config_.num_snapshots > 0) pages = pages_with_snapshot(config_, *holder, pages);
    const int64_t spared = (pages - request.num_shared) * config_.page_size;
    if (spared > 0 && 2 * spared >= std::ssize(request.text) - request.num_shared * config_.page_size) return true;
  }
  return false;
}

// Finds the cached pages that a request without a slot can begin with, and locks them.
void Scheduler::share_prefix(Request& request) {
  release_prefix(request);
  request.branch = 0;
  if (!config_.prefix_cache || request.migrated || !request.shares_prefix) return;
  const int64_t most = most_shared(config_, request);
  request.prefix = prefix_.cache.find(request.text, most);
  request.branch = PrefixCache::num_pages(request.prefix);
  if (config_.num_snapshots > 0) request.prefix = prefix_.cache.find_snapshot(request.text, most);
  request.num_shared = static_cast<int32_t>(PrefixCache::num_pages(request.prefix));
  prefix_.cache.lock(request.prefix);
}

// Returns the validated rows of a request that its draft has also written: rows of rounds with an idle draft are
// missing. If the request wants no drafts, its draft may have been idle in any round but the first, which writes its
// row of the root.
int64_t Scheduler::validated_rows(const Request& request) const {
  if (!config_.draft_can_idle) return request.seq_len();
  if (request.wants_drafts()) return request.seq_len() - request.draft_lag;
  return request.migrated ? 0 : std::min(request.seq_len(), request.prefilled - 1);
}

void Scheduler::release_prefix(Request& request) {
  if (request.prefix != nullptr) prefix_.cache.unlock(std::exchange(request.prefix, nullptr));
  request.num_shared = 0;
}

// Returns the entries of the pages that a request shares.
std::vector<int32_t> Scheduler::shared_entries(const Request& request) const {
  if (request.num_shared == 0) return {};
  std::vector<int32_t> entries = PrefixCache::places(request.prefix);
  for (int32_t& entry : entries) entry += static_cast<int32_t>(first_entry(config_, config_.num_slots));
  return entries;
}

// Caches the whole validated pages of a slot. If the cache already has the same rows from another request, the slot
// takes those pages and frees its own, so every shared page of a slot belongs to the cache. A draft's rows that depend
// on several tokens after them follow later than the target's.
void Scheduler::cache_pages(Request& request) {
  const int64_t rows = std::max<int64_t>(request.num_validated - (config_.lookahead - 1), 0);
  const int64_t pages = rows / config_.page_size, before = request.num_shared;
  if (!config_.prefix_cache || !request.cacheable || pages <= before) return;
  const int64_t known = PrefixCache::num_pages(prefix_.cache.find(request.text, pages));
  PrefixCache::Node* const prefix = prefix_.cache.insert(request.text, pages);
  prefix_.cache.lock(prefix);
  release_prefix(request);
  request.prefix = prefix;
  request.num_shared = static_cast<int32_t>(PrefixCache::num_pages(prefix));

  std::vector<int32_t> sources, destinations = shared_entries(request);
  destinations.erase(destinations.begin(), destinations.begin() + before);
  for (int64_t page = before; page < request.num_shared; ++page)
    sources.push_back(static_cast<int32_t>(first_entry(config_, request.slot) + page));
  std::swap_ranges(sources.begin(), sources.begin() + (known - before), destinations.begin());
  assign_pages(sources, destinations);
  keep_snapshots(request);
}

// Returns the rows of a request's text that its next chunk may have, up to where its next snapshot is to be saved: at
// every snapshot_pages-th page, where its text left cached ones, so that a third one finds what two have in common, and
// at its last whole page.
int64_t Scheduler::rows_to_snapshot(const Request& request) const {
  const int64_t rows = request.rows_to_prefill();
  if (config_.num_snapshots == 0 || !request.cacheable || rows == 0) return rows;
  const int64_t regular = config_.snapshot_pages * config_.page_size;
  int64_t count = rows;
  for (const int64_t end : {(request.prefilled / regular + 1) * regular, request.branch * config_.page_size,
                            most_shared(config_, request) * config_.page_size})
    if (end > request.prefilled) count = std::min(count, end - request.prefilled);
  return count;
}

// Takes snapshots for those of these requests whose last chunk has ended where one is to be saved, and returns them. If
// rows of a request turn out to be bad, it ends with an error, and its snapshots serve nobody.
std::vector<Request*> Scheduler::take_due_snapshots(const std::vector<Request*>& requests) {
  std::vector<Request*> due;
  for (Request* request : requests) {
    const int64_t pages = request->prefilled / config_.page_size;
    if (!request->cacheable || pages == 0) continue;
    if (request->prefilled % config_.page_size != 0 || pages_with_snapshot(config_, *request, pages) != pages) continue;
    const int32_t snapshot = take_snapshot(*request);
    if (snapshot < 0) continue;
    request->snapshots.push_back({pages, snapshot});
    due.push_back(request);
  }
  prefix_.num_saved_snapshots += std::ssize(due);
  update_counters();
  return due;
}

// Takes a snapshot for a request. If it has saved half of all since it began, at least 2, or others have taken all,
// this is the first that it has saved; -1: there is none.
int32_t Scheduler::take_snapshot(Request& request) {
  auto& saved = request.snapshots;
  const int64_t most = std::max<int64_t>(config_.num_snapshots / 2, 2);
  int32_t snapshot = std::ssize(saved) < most ? prefix_.cache.take_snapshot() : -1;
  if (snapshot >= 0 || saved.empty()) return snapshot;
  snapshot = saved.front().id;
  saved.erase(saved.begin());
  return snapshot;
}

// Gives the snapshots that a request has saved to its pages, which are cached now.
void Scheduler::keep_snapshots(Request& request) {
  for (const Snapshot& each : request.snapshots) prefix_.cache.keep_snapshot(request.text, each.pages, each.id);
  request.snapshots.clear();
}

void Scheduler::release_snapshots(Request& request) {
  for (const Snapshot& each : request.snapshots) prefix_.cache.give_back_snapshot(each.id);
  request.snapshots.clear();
}

// Evicts cached pages, least recently used first, until the pool has room for `count` other pages.
void Scheduler::evict_pages_for(int64_t count) {
  const int64_t lacking = count + prefix_.cache.size() - config_.num_pages;
  if (lacking > 0) release_places(prefix_.cache.evict(lacking));
}

// Frees the pages of places of the cache.
void Scheduler::release_places(std::vector<int32_t> places) {
  for (int32_t& place : places) place += static_cast<int32_t>(first_entry(config_, config_.num_slots));
  assign_pages(std::vector<int32_t>(places.size(), -1), places);
}

// Assigns pages on the device. After an exception the contents of the cache are unknown, but no request is affected.
void Scheduler::assign_pages(Entries sources, Entries destinations) {
  if (destinations.empty()) return;
  other_work_since_round_ = true;
  try {
    executor_.assign_pages(sources, destinations);
  } catch (...) {
    prefix_.pages_unknown = true;
    prefix_.error = std::current_exception();
    forget_cached_pages();
  }
}

// Empties the cache, whatever its places hold, and returns these. Requests that share pages keep them as their own.
std::vector<int32_t> Scheduler::forget_cached_pages() {
  const auto forget = [](const auto& request) {
    request->prefix = nullptr;
    request->num_shared = 0;
  };
  std::ranges::for_each(slots_.holders(), forget);
  std::ranges::for_each(waiting_, forget);
  return prefix_.cache.clear();
}

void Scheduler::empty_cache() {
  std::vector<int32_t> places = forget_cached_pages();
  if (prefix_.pages_unknown) {
    places.resize(prefix_.cache.num_places());
    std::iota(places.begin(), places.end(), 0);
  }
  prefix_.pages_unknown = false;
  release_places(std::move(places));
  update_counters();
  if (prefix_.error != nullptr) std::rethrow_exception(std::exchange(prefix_.error, nullptr));
}

}  // namespace specdec::scheduler
