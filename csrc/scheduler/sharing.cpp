// The loop's side of the prefix cache: what begins with cached pages, what becomes one, and what is let go of.
//
// Pages are the device's: here they are entries of its page table, those of the slots first, then the cache's places. A
// page is shared when a round that attended to its rows has been read and found nothing wrong, so a row that was
// drafted and not kept, or that was never written, is in no shared page.
#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "scheduler/admission.h"
#include "scheduler/scheduler.h"

namespace specdec::scheduler {
namespace {

// The first entry of a slot's row of the page table; that of the places is behind all slots.
int64_t first_entry(const Config& config, int64_t slot) { return slot * pages_for(config, config.max_len); }

// Whole pages that a request may find written: the root's row at least is left to prefill, which yields the first
// token.
int64_t most_shared(const Config& config, const Request& request) { return request.seq_len() / config.page_size; }

}  // namespace

// Whether a request that is still at the text of this one is about to share so much of it that waiting for that spares
// half of the prefill or more: samples of one prompt that come together are prefilled once.
bool Scheduler::awaits_prefix(const Request& request) const {
  if (!config_.prefix_cache || request.written) return false;
  for (const auto& holder : slots_.holders()) {
    if (holder->sound > 0) continue;
    const auto alike = std::ranges::mismatch(holder->text, request.text).in1 - holder->text.begin();
    const int64_t pages = std::min((alike - 1) / config_.page_size, most_shared(config_, request));
    const int64_t spared = (pages - request.num_shared) * config_.page_size;
    if (spared > 0 && 2 * spared >= std::ssize(request.text) - request.num_shared * config_.page_size) return true;
  }
  return false;
}

// Finds what a request without a slot can begin with, and holds on to it.
void Scheduler::share_prefix(Request& request) {
  leave_prefix(request);
  if (!config_.prefix_cache || request.written) return;
  request.prefix = cache_.find(request.text, most_shared(config_, request));
  request.num_shared = static_cast<int32_t>(PrefixCache::num_pages(request.prefix));
  cache_.lock(request.prefix);
}

// Of the rows of a request, of which a round has found nothing wrong, those that its draft has written, too: not those
// of rounds at rest. The draft of one that wants no drafts may have rested in any round but a first one, which is the
// one that writes its row of the root.
int64_t Scheduler::sound_rows(const Request& request) const {
  if (!config_.draft_can_idle) return request.seq_len();
  if (request.wants_drafts()) return request.seq_len() - request.behind;
  return request.written ? 0 : std::min(request.seq_len(), request.prefilled - 1);
}

void Scheduler::leave_prefix(Request& request) {
  if (request.prefix != nullptr) cache_.unlock(std::exchange(request.prefix, nullptr));
  request.num_shared = 0;
}

// The entries of the pages that a request shares.
std::vector<int32_t> Scheduler::shared_entries(const Request& request) const {
  if (request.num_shared == 0) return {};
  std::vector<int32_t> entries = PrefixCache::places(request.prefix);
  for (int32_t& entry : entries) entry += static_cast<int32_t>(first_entry(config_, config_.num_slots));
  return entries;
}

// Shares the whole pages of a slot that are known to be right. Where the cache has the same rows of somebody else, the
// slot takes these for its own, whose page is free again: then every shared page of a slot is the cache's.
void Scheduler::cache_pages(Request& request) {
  const int64_t pages = request.sound / config_.page_size, before = request.num_shared;
  if (!config_.prefix_cache || pages <= before) return;
  const int64_t known = PrefixCache::num_pages(cache_.find(request.text, pages));
  PrefixCache::Node* const prefix = cache_.insert(request.text, pages);
  cache_.lock(prefix);
  leave_prefix(request);
  request.prefix = prefix;
  request.num_shared = static_cast<int32_t>(PrefixCache::num_pages(prefix));

  std::vector<int32_t> sources, destinations = shared_entries(request);
  destinations.erase(destinations.begin(), destinations.begin() + before);
  for (int64_t page = before; page < request.num_shared; ++page)
    sources.push_back(static_cast<int32_t>(first_entry(config_, request.slot) + page));
  std::swap_ranges(sources.begin(), sources.begin() + (known - before), destinations.begin());
  assign_pages(sources, destinations);
}

// Lets go of cached pages, those first that were not used for the longest time, until `count` others fit beside them.
void Scheduler::make_pages(int64_t count) {
  const int64_t lacking = count + cache_.size() - config_.num_pages;
  if (lacking > 0) drop_places(cache_.evict(lacking));
}

// Places of the cache give up their pages.
void Scheduler::drop_places(std::vector<int32_t> places) {
  for (int32_t& place : places) place += static_cast<int32_t>(first_entry(config_, config_.num_slots));
  assign_pages(std::vector<int32_t>(places.size(), -1), places);
}

// Tells the device. An exception costs nobody but the cache, of which then nothing is known.
void Scheduler::assign_pages(Entries sources, Entries destinations) {
  if (destinations.empty()) return;
  other_work_ = true;
  try {
    executor_.assign_pages(sources, destinations);
  } catch (...) {
    cache_lost_ = true;
    cache_failure_ = std::current_exception();
    forget_pages();
  }
}

// The cache is empty from here on, whatever its places hold. Who shares pages keeps them as if they were its own.
std::vector<int32_t> Scheduler::forget_pages() {
  const auto forget = [](const auto& request) {
    request->prefix = nullptr;
    request->num_shared = 0;
  };
  std::ranges::for_each(slots_.holders(), forget);
  std::ranges::for_each(waiting_, forget);
  return cache_.clear();
}

void Scheduler::empty_cache() {
  std::vector<int32_t> places = forget_pages();
  if (cache_lost_) {
    places.resize(cache_.num_places());
    std::iota(places.begin(), places.end(), 0);
  }
  cache_lost_ = false;
  drop_places(std::move(places));
  publish();
  if (cache_failure_ != nullptr) std::rethrow_exception(std::exchange(cache_failure_, nullptr));
}

}  // namespace specdec::scheduler
