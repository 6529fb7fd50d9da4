#include "scheduler/config.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "round/records.h"
#include "scheduler/admission.h"
#include "scheduler/round_costs.h"

namespace specdec::scheduler {

int64_t Config::num_rungs() const {
  size_t most = 0;
  for (const auto& each : rows) most = std::max(most, each.size());
  return most > 1 ? static_cast<int64_t>(most) : 0;
}

void check_config(const Config& config) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMostSlots = 1 << 20, kWidest = 1 << 16;  // so that no number of words leaves 64 bits
  Check check("Scheduler");
  check.range("num_slots", config.num_slots, 1, kMostSlots);
  check.range("page_size", config.page_size, 1, kMost);
  check.range("max_len", config.max_len, 2, kMost);
  check.range("accept_width", config.accept_width, 1, kWidest);
  check.range("max_stops", config.max_stops, 0, kWidest);
  check.range("max_logprobs", config.max_logprobs, -1, kWidest);
  check.range("reserve", config.reserve, config.accept_width + 1, kMost);
  check.range("prefill_chunk", config.prefill_chunk, 1, kMost);
  check.range("prefill_requests", config.prefill_requests, 1, kMost);
  check.range("rounds_in_flight", config.rounds_in_flight, 1, 64);
  check.that(!config.batch_sizes.empty(), "batch_sizes", "is empty", "at least 1 size");
  int64_t smallest_batch = 1;
  for (const int64_t batch : config.batch_sizes) {
    check.range("batch_sizes (rising)", batch, smallest_batch, config.num_slots);
    smallest_batch = batch + 1;
  }
  check_rows(check, "batch_sizes", config.batch_sizes, config.rows);
  for (const auto& each : config.rows) check.range("rows (the most)", each.back(), 1, kMost);
  check.range("rows (how many of a batch size)", config.num_rungs(), 0, round::kMostRungs);
  const int64_t smallest = pages_for(config, config.max_len);
  check.that(config.num_pages >= smallest && config.num_pages <= kMost, "num_pages", {"is ", config.num_pages},
             {smallest, " to ", kMost, " (one sequence of max_len tokens must fit)"});
}

}  // namespace specdec::scheduler
