// Decides which requests fit into the page pool: pure functions of lengths and pages (round.md, section 6).
//
// A running slot of length L holds ceil((L + reserve) / page_size) pages from its next round on, and keeps them. Each
// of its rounds in flight may have made it accept_width tokens longer. A prefilling slot counts with its prompt. If
// pages before the attention window are given back, a slot holds at most the window, the rows ahead of it (of a round
// or, during prefill, of a chunk) and one partial page. Pages of the prefix cache count once, not with the slots that
// share them.
#pragma once

#include <memory>
#include <span>

#include "scheduler/config.h"
#include "scheduler/request.h"

namespace specdec::scheduler {

using Holders = std::span<const std::unique_ptr<Request>>;

// Returns the KV rows of a sequence with `seq_len` committed tokens, with its reserve. No sequence exceeds max_len.
int64_t rows_for(const Config& config, int64_t seq_len);

// Returns the pages of these rows.
int64_t pages_for(const Config& config, int64_t seq_len);

// Returns the most pages that it holds at once, with pages for at most `ahead` rows ahead of its window.
int64_t pages_held(const Config& config, int64_t seq_len, int64_t ahead);

// Returns the most rows ahead of its window for which a slot has pages, during prefill or later.
int64_t rows_ahead(const Config& config);

// Returns the holders' own pages, if every running one accepts all it can in its rounds in flight and `more_rounds`
// more.
int64_t pages_needed(const Config& config, Holders holders, int64_t more_rounds);

// Returns the KV rows of the longest of these requests in the next round, if they accept all they can until then.
int64_t max_kv_len(const Config& config, std::span<Request* const> requests);

// Returns whether another round may be launched; the prefix cache cannot evict `num_locked` pages.
bool round_fits(const Config& config, Holders holders, int64_t num_locked);

// Returns whether the request may get a slot. Reserves one extra round for every running request, so that the new one
// is not retracted at once, and two requests cannot evict each other in turn.
bool request_fits(const Config& config, Holders holders, int64_t num_locked, const Request& request);

}  // namespace specdec::scheduler
