#include "scheduler/config.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "round/records.h"
#include "scheduler/admission.h"
#include "scheduler/round_costs.h"

namespace specdec::scheduler {

int64_t Config::num_levels() const {
  size_t most = 0;
  for (const auto& each : rows) most = std::max(most, each.size());
  return most > 1 ? static_cast<int64_t>(most) : 0;
}

std::vector<std::vector<int64_t>> Config::all_rows() const {
  auto all = rows;
  for (size_t i = 0; i < all.size(); ++i)
    if (plain_rounds && all[i].front() > batch_sizes[i]) all[i].insert(all[i].begin(), batch_sizes[i]);
  return all;
}

void check_config(const Config& config) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMostSlots = 1 << 20, kWidest = 1 << 16;  // so that word counts fit 64 bits
  Check check("Scheduler");
  check.range("num_slots", config.num_slots, 1, kMostSlots);
  check.range("page_size", config.page_size, 1, kMost);
  check.range("window", config.window, 0, config.prefix_cache ? 0 : kMost);  // cached pages are never given back
  check.range("vocab_size", config.vocab_size, 1, kMost);
  check.range("max_len", config.max_len, 2, kMost);
  check.range("accept_width", config.accept_width, 1, kWidest);
  check.range("max_stops", config.max_stops, 0, kWidest);
  check.range("max_logprobs", config.max_logprobs, -1, kWidest);
  check.range("reserve", config.reserve, config.accept_width + 1, kMost);
  check.range("prefill_chunk", config.prefill_chunk, 1, kMost);
  check.range("prefill_requests", config.prefill_requests, 1, kMost);
  check.range("rounds_in_flight", config.rounds_in_flight, 1, 64);
  check.range("num_snapshots", config.num_snapshots, 0, config.prefix_cache ? kMost : 0);
  check.range("snapshot_pages", config.snapshot_pages, 1, kMost);
  check.range("lookahead", config.lookahead, 1, kWidest);
  check.that(!config.batch_sizes.empty(), "batch_sizes", "is empty", "at least 1 size");
  int64_t smallest_batch = 1;
  for (const int64_t batch : config.batch_sizes) {
    check.range("batch_sizes (increasing)", batch, smallest_batch, config.num_slots);
    smallest_batch = batch + 1;
  }
  check_rows(check, "batch_sizes", config.batch_sizes, config.rows);
  for (const auto& each : config.rows) check.range("rows (the most)", each.back(), 1, kMost);
  check.range("rows (how many of a batch size)", config.num_levels(), 0, round::kMaxLevels);
  if (!config.drafted.empty()) {
    check.that(config.drafted.size() == config.rows.size(), "drafted", {"has ", config.drafted.size(), " lists"},
               {config.rows.size(), " like rows"});
    for (size_t i = 0; i < config.rows.size(); ++i)
      check.that(config.drafted[i].size() == config.rows[i].size(), "drafted",
                 {"has ", config.drafted[i].size(), " numbers for ", config.batch_sizes[i], " requests"},
                 {config.rows[i].size(), " like rows"});
  }
  check.range("max_idle_rounds", config.max_idle_rounds, 0, kMost);
  for (size_t i = 0; i < config.rows.size(); ++i)
    check.that(config.max_idle_rounds == 0 || config.rows[i].front() == config.batch_sizes[i], "max_idle_rounds",
               {"is ", config.max_idle_rounds},
               {"0 (rounds of ", config.batch_sizes[i], " requests have ", config.rows[i].front(),
                " rows at least, and a draft is idle only in those of one each)"});
  const int64_t smallest = pages_held(config, config.max_len, rows_ahead(config));
  check.that(config.num_pages >= smallest && config.num_pages <= kMost, "num_pages", {"is ", config.num_pages},
             {smallest, " to ", kMost, " (one sequence of max_len tokens must fit)"});
}

}  // namespace specdec::scheduler
