// Chooses how many draft tokens to verify each round.
//
// Verifying one more token costs time for the whole batch and pays off only if the token is accepted. A *budget level*
// is a total number of rows (tokens) to verify for a batch size; the lowest level is one row per request, i.e. plain
// decoding. The cost of a level is measured at startup and updated as rounds run (round_costs.h). The gain of a level
// is learned from rounds: each round reports, for every level, how many tokens the draft's scores predicted and how
// many would have been accepted, as far as the round can tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "scheduler/budget_constants.h"
#include "scheduler/round_costs.h"

namespace specdec::scheduler {

// Models the expected number of accepted draft tokens per request as a function of rows per request.
//
// All batch sizes share one curve, so nothing learned is lost when the batch grows or shrinks. The curve is piecewise
// linear. Each segment stores the predicted gain (a moving average) and a correction factor (observed / predicted).
// Segments with few observations are optimistic: the gain per row never increases with rows, and the total gain never
// exceeds the longest path.
class GainModel {
 public:
  GainModel(double max_rows_per_request, int64_t accept_width, const BudgetConstants& constants = {});

  // Records one round of `num_requests` requests. `rows` are rows per request, increasing from 1. `predicted[i]` is the
  // gain per request that the draft's scores predict at rows[i]; `observed[i]` is the gain that was seen, for the first
  // observed.size() entries, at least one. Learns nothing about row counts above rows.back().
  void update(double num_requests, std::span<const double> rows, std::span<const double> predicted,
              std::span<const double> observed);

  // Returns the expected gain per request at this many rows per request.
  double gain_at(double rows) const;

 private:
  struct Segment {
    double end;                                  // rows per request; starts where the previous one ends (the first: 1)
    double predicted_mean = 0;                   // moving average over recent rounds
    double weight = 0;                           // observations in predicted_mean, at most a window
    double num_observations = 0;                 // requests times rounds, in all; optimism fades as it grows
    double predicted_sum = 0, observed_sum = 0;  // exponentially decayed, over rounds that report both
  };
  const BudgetConstants constants_;
  const double max_gain_;
  std::vector<Segment> segments_;
};

class Budget {
 public:
  // `levels[i]` are the budget levels of batch_sizes[i], in rows, as in RoundCosts. A request accepts at most
  // `accept_width` tokens per round. If `max_idle_rounds` > 0, a draft that has been skipped for that many rounds must
  // catch up before it can be skipped again. `drafted` are the most nodes that are drafted for a request at each level;
  // empty: as many as the level has rows.
  Budget(const std::vector<int64_t>& batch_sizes, std::vector<std::vector<int64_t>> levels, int64_t accept_width,
         int64_t max_idle_rounds = 0, const BudgetConstants& constants = {},
         std::vector<std::vector<int64_t>> drafted = {});

  // Sets measured costs. Until then every round uses the highest level.
  void set_costs(RoundCosts costs);
  std::optional<RoundCosts> costs() const { return model_ ? std::optional(model_->measured()) : std::nullopt; }

  // Returns the level for the next round: the one with the highest expected tokens per microsecond. `kv_rows` is the
  // sum of the requests' lengths.
  //
  // Two kinds of exploration keep the estimates honest. A higher level is tried now and then, because its gain cannot
  // be observed from below (at most 1/64 of the time and a 1/128 loss). A lower level is re-timed now and then, because
  // its cost may have changed. `draft_lag` is the number of rounds for which the draft has been skipped. Catching up
  // costs time, so drafting resumes only after the throughput lost by not drafting exceeds that cost (the ski-rental
  // rule).
  size_t next_level(size_t size_index, double num_requests, double kv_rows, double draft_lag = 0);

  // Records the duration of a round in microseconds.
  void update_cost(size_t size_index, size_t level, double num_requests, double kv_rows, double us);

  // Records predicted and observed gains, summed over the requests, of the levels that a round of this level reports,
  // from the lowest on. `observed` may be shorter, but not empty.
  void update_gain(size_t size_index, size_t level, double num_requests, std::span<const double> predicted,
                   std::span<const double> observed);

  // Returns the expected tokens per request for a round at this level, the bonus token included.
  double expected_tokens(size_t size_index, size_t level, double num_requests) const;

 private:
  double rows_per_request(size_t size_index, size_t level, double num_requests, size_t drafted_level) const;
  size_t level_to_explore(std::span<const double> us, size_t best) const;
  std::optional<size_t> level_to_retime(size_t size_index, size_t best, std::span<const double> us,
                                        std::span<const double> tokens) const;
  double catch_up_cost(size_t size_index, double draft_lag) const;

  const BudgetConstants constants_;
  const std::vector<int64_t> batch_sizes_;
  const std::vector<std::vector<int64_t>> levels_;
  const double max_idle_rounds_;
  const std::vector<std::vector<int64_t>> drafted_;
  GainModel gain_;
  std::optional<CostModel> model_;
  std::vector<size_t> last_level_;  // by size index, explorations left out
  double us_since_explore_ = 0, us_since_retime_ = 0;
  double us_lost_while_idle_ = 0;  // since a higher level became the best
  size_t explored_size_ = 0, explored_level_ = 0;
  int explore_rounds_left_ = 0;
};

}  // namespace specdec::scheduler
