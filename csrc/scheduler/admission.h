// Who fits into the page pool: pure functions of lengths and pages (round.md, section 6).
//
// A running slot of length L holds ceil((L + reserve) / page_size) pages from its next round on, and keeps them. Each
// round it takes part in that is launched and not yet read may have made it accept_width tokens longer. A prefilling
// slot counts with its prompt. Where pages behind a window are given back, no slot holds more than the window, the rows
// ahead of it and a page of which only a part is seen: these rows are a round's, or while it is prefilled a chunk's.
// Pages of the prefix cache count once: not with the slots that share them.
#pragma once

#include <memory>
#include <span>

#include "scheduler/config.h"
#include "scheduler/request.h"

namespace specdec::scheduler {

using Holders = std::span<const std::unique_ptr<Request>>;

// KV rows of a sequence with `seq_len` committed tokens, with its reserve. No sequence outgrows max_len.
int64_t rows_for(const Config& config, int64_t seq_len);

// Their pages.
int64_t pages_for(const Config& config, int64_t seq_len);

// Those that it holds at once, when it has pages for so many rows ahead of its window at most.
int64_t pages_held(const Config& config, int64_t seq_len, int64_t ahead);

// Rows that it may have pages for ahead of its window, when it is prefilled or later.
int64_t rows_ahead(const Config& config);

// Pages of the holders' own, when every running one accepts all it can in its rounds in flight and in `more_rounds`.
int64_t pages_needed(const Config& config, Holders holders, int64_t more_rounds);

// KV rows of the longest of these requests in the next round, when they accept all they can in their rounds in flight.
int64_t max_kv_len(const Config& config, std::span<Request* const> requests);

// May another round be launched, where the prefix cache cannot let go of `num_locked` pages?
bool round_fits(const Config& config, Holders holders, int64_t num_locked);

// May the request get a slot? One extra round for every running request, so that the newcomer is not retracted at once
// and two requests cannot evict each other in turn.
bool request_fits(const Config& config, Holders holders, int64_t num_locked, const Request& request);

}  // namespace specdec::scheduler
