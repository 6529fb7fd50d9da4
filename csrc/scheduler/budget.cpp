#include "scheduler/budget.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace specdec::scheduler {
namespace {

// Returns the value at x of the piecewise linear curve through (1, 0) and these points, extrapolated beyond the last.
double interpolate(double x, std::span<const double> xs, std::span<const double> ys) {
  double x0 = 1, y0 = 0, slope = 0;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (xs[i] <= x0) continue;  // the level of one row per request
    slope = (ys[i] - y0) / (xs[i] - x0);
    if (x <= xs[i]) break;
    x0 = xs[i];
    y0 = ys[i];
  }
  return y0 + slope * (x - x0);
}

// Returns the most rows per request of any full batch.
double max_rows_per_request(const std::vector<int64_t>& batch_sizes, const std::vector<std::vector<int64_t>>& levels) {
  double most = 1;
  for (size_t i = 0; i < batch_sizes.size(); ++i)
    most = std::max(most, static_cast<double>(levels[i].back()) / static_cast<double>(batch_sizes[i]));
  return most;
}

}  // namespace

GainModel::GainModel(double max_rows_per_request, int64_t accept_width, const BudgetConstants& constants)
    : constants_(constants), max_gain_(static_cast<double>(accept_width - 1)) {
  // Four segments to each doubling: budget levels are further apart.
  for (double begin = 1, octave = 1; begin < max_rows_per_request; octave *= 2)
    for (int quarter = 1; quarter <= 4 && begin < max_rows_per_request; ++quarter) {
      begin = octave * (1 + quarter / 4.0);
      segments_.push_back({.end = begin});
    }
}

void GainModel::update(double num_requests, std::span<const double> rows, std::span<const double> predicted,
                       std::span<const double> observed) {
  const double min_window = constants_.min_window_rounds * num_requests;
  const double decay = num_requests / std::max(constants_.correction_window, min_window);
  const double observed_rows = rows[observed.size() - 1];
  double begin = 1;
  for (Segment& segment : segments_) {
    if (begin >= rows.back()) break;
    const auto rise = [&](std::span<const double> gains) {
      const auto xs = rows.first(gains.size());
      return std::max(interpolate(segment.end, xs, gains) - interpolate(begin, xs, gains), 0.0);
    };
    segment.weight = std::min(segment.weight + num_requests, std::max(constants_.gain_window, min_window));
    segment.predicted_mean += (rise(predicted) - segment.predicted_mean) * (num_requests / segment.weight);
    segment.num_observations += num_requests;
    if (begin < observed_rows) {
      segment.predicted_sum += num_requests * rise(predicted.first(observed.size())) - decay * segment.predicted_sum;
      segment.observed_sum += num_requests * rise(observed) - decay * segment.observed_sum;
    }
    begin = segment.end;
  }
}

double GainModel::gain_at(double rows) const {
  const double optimism = constants_.optimism, prior = constants_.correction_prior;
  double gain = 0, begin = 1, correction = 1, slope = 1;
  for (const Segment& segment : segments_) {
    if (begin >= rows) break;
    const double width = segment.end - begin;
    correction = std::min((segment.observed_sum + prior * correction) / (segment.predicted_sum + prior),
                          constants_.max_correction);
    const double known = correction * segment.predicted_mean, optimistic = std::min(slope * width, max_gain_ - gain);
    const double rise = std::lerp(known, std::max(optimistic, known), optimism / (optimism + segment.num_observations));
    gain += rise * std::min((rows - begin) / width, 1.0);
    slope = rise / width;
    begin = segment.end;
  }
  return gain;
}

Budget::Budget(const std::vector<int64_t>& batch_sizes, std::vector<std::vector<int64_t>> levels, int64_t accept_width,
               int64_t max_idle_rounds, const BudgetConstants& constants, std::vector<std::vector<int64_t>> drafted)
    : constants_(constants),
      batch_sizes_(batch_sizes),
      levels_(std::move(levels)),
      max_idle_rounds_(static_cast<double>(max_idle_rounds)),
      drafted_(std::move(drafted)),
      gain_(max_rows_per_request(batch_sizes, levels_), accept_width, constants),
      last_level_(levels_.size()) {}

void Budget::set_costs(RoundCosts costs) { model_.emplace(std::move(costs)); }

// Returns the rows that each request has at a level, of the nodes that are drafted at `drafted_level`. A level of one
// row per place of the batch has no room for drafts, even if fewer requests than places take part. With fewer requests
// there is room for more nodes than are drafted: rows without a node gain nothing, which says nothing of larger trees.
double Budget::rows_per_request(size_t size_index, size_t level, double num_requests, size_t drafted_level) const {
  const int64_t rows = levels_[size_index][level];
  if (rows == batch_sizes_[size_index]) return 1;
  const double each = static_cast<double>(rows) / num_requests;
  return drafted_.empty() ? each : std::min(each, static_cast<double>(drafted_[size_index][drafted_level]));
}

double Budget::expected_tokens(size_t size_index, size_t level, double num_requests) const {
  return 1 + gain_.gain_at(rows_per_request(size_index, level, num_requests, level));
}

// Returns what catching up now costs, beyond what the draft owes anyway: a draft with a larger lag has to catch up
// soon, so it is charged less.
double Budget::catch_up_cost(size_t size_index, double draft_lag) const {
  const std::vector<double>& us = model_->measured().catch_up;
  return us.empty() || draft_lag == 0 ? 0 : us[size_index] * std::max(1 - draft_lag / max_idle_rounds_, 0.0);
}

size_t Budget::next_level(size_t size_index, double num_requests, double kv_rows, double draft_lag) {
  const size_t num_levels = levels_[size_index].size();
  if (!model_ || num_levels == 1) return num_levels - 1;
  std::vector<double> us, tokens;
  for (size_t level = 0; level < num_levels; ++level) {
    us.push_back(model_->expected_us(size_index, level, num_requests, kv_rows));
    tokens.push_back(expected_tokens(size_index, level, num_requests));
  }
  // A round without drafting adds its share of the next catch-up.
  if (const std::vector<double>& catch_up = model_->measured().catch_up; !catch_up.empty())
    us[0] += catch_up[size_index] / max_idle_rounds_;
  const double catch_up_us = catch_up_cost(size_index, draft_lag);
  const auto throughput = [&](size_t level) { return tokens[level] / us[level]; };
  size_t best = 0;
  for (size_t level = 1; level < num_levels; ++level)
    if (throughput(level) > throughput(best)) best = level;
  const size_t last = last_level_[size_index];
  if (best > last && throughput(best) <= constants_.switch_margin * throughput(last)) best = last;
  // Ski rental: not drafting until the loss equals the cost of catching up costs at most twice the optimum.
  if (best == 0 || catch_up_us == 0)
    us_lost_while_idle_ = 0;
  else if ((us_lost_while_idle_ += us[0] * std::max(throughput(best) / throughput(0) - 1, 0.0)) < catch_up_us)
    best = 0;
  last_level_[size_index] = best;

  us_since_explore_ += us[best];
  us_since_retime_ += us[best];
  if (explore_rounds_left_ > 0 && explored_size_ != size_index) {
    // The batch size has changed during an exploration. Its last round shows nothing unless it follows the one before,
    // so it runs at the new size, and is paid for afterwards.
    explored_size_ = size_index;
    explored_level_ = std::min(explored_level_, level_to_explore(us, best));
    if (explored_level_ > best)
      us_since_explore_ -= std::max(us[explored_level_] / constants_.explore_time_share,
                                    (us[explored_level_] - 1 / throughput(best)) / constants_.explore_loss_share);
  }
  if (explore_rounds_left_ == 0) {
    if (const auto level = level_to_retime(size_index, best, us, tokens)) {
      const double lost =
          us[*level] - tokens[*level] / throughput(best) + (*level == 0 ? catch_up_cost(size_index, 1) : 0);
      if (us_since_retime_ * constants_.retime_time_share >= us[*level] &&
          us_since_retime_ * constants_.retime_loss_share >= lost) {
        us_since_retime_ = 0;
        return *level;
      }
    }
    if (best + 1 == num_levels) return best;
    explored_level_ = level_to_explore(us, best);
    const double lost = us[explored_level_] - 1 / throughput(best);  // as if it gave each request one token
    if (us_since_explore_ * constants_.explore_time_share <
            constants_.explore_rounds * us[explored_level_] + catch_up_us ||
        us_since_explore_ * constants_.explore_loss_share < constants_.explore_rounds * lost + catch_up_us)
      return best;
    us_since_explore_ = 0;
    explored_size_ = size_index;
    explore_rounds_left_ = constants_.explore_rounds;
  }
  --explore_rounds_left_;
  return std::max(best, std::min(explored_level_, num_levels - 1));
}

// Returns the highest level that is not too expensive, since it also shows those below it; at least the next one.
size_t Budget::level_to_explore(std::span<const double> us, size_t best) const {
  size_t level = us.size() - 1;
  while (level > best + 1 && us[level] > constants_.explore_max_cost * us[best]) --level;
  return level;
}

// Among lower levels that would win at their measured cost, returns the one whose cost is most stale: rounds of the
// best level do not show what it costs now.
std::optional<size_t> Budget::level_to_retime(size_t size_index, size_t best, std::span<const double> us,
                                              std::span<const double> tokens) const {
  std::optional<size_t> stalest;
  for (size_t level = 0; level < best; ++level)
    if (tokens[level] / model_->measured().us[size_index][level] > tokens[best] / us[best] &&
        (!stalest || model_->evidence(size_index, level) < model_->evidence(size_index, *stalest)))
      stalest = level;
  return stalest;
}

void Budget::update_cost(size_t size_index, size_t level, double num_requests, double kv_rows, double us) {
  if (model_) model_->update(size_index, level, num_requests, kv_rows, us);
}

void Budget::update_gain(size_t size_index, size_t level, double num_requests, std::span<const double> predicted,
                         std::span<const double> observed) {
  std::vector<double> rows, predicted_each, observed_each;
  for (size_t i = 0; i < predicted.size(); ++i) {
    rows.push_back(rows_per_request(size_index, i, num_requests, level));
    predicted_each.push_back(predicted[i] / num_requests);
    if (i < observed.size()) observed_each.push_back(observed[i] / num_requests);
  }
  gain_.update(num_requests, rows, predicted_each, observed_each);
}

}  // namespace specdec::scheduler
