#include "scheduler/ladder.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/errors.h"

namespace specdec::scheduler {
namespace {

// A mean is over about this many latest observations: enough to tell apart what matters (a standard error of about 6 %
// at usual accept lengths), few enough to follow a text that changes.
constexpr int64_t kMemory = 32;
// Before anything is observed drafts are as good as they can be, as if seen a few times: what a rung does not bring is
// seen as soon as it is tried, and what it would bring is not seen from below.
constexpr int64_t kFirstCount = 4;
// The share of the time that goes into rungs above the best, in trials of so many rounds (the first shows nothing of
// them, see observe), and how much more than the best such a round may cost where several are above it.
constexpr double kTrialShare = 1.0 / 64;
constexpr int kTrialRounds = 2;
constexpr double kTrialCost = 2;

std::string text_of(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

void expect_rising(const char* name, const std::vector<int64_t>& values) {
  const bool rising = std::ranges::adjacent_find(values, std::greater_equal<>()) == values.end();
  if (values.empty() || values.front() < 1 || !rising)
    throw ValueError(std::string("RoundCosts: ") + name + " is " + text_of(values) +
                     ", expected rising numbers from 1 on");
}

}  // namespace

RoundCosts::RoundCosts(std::vector<int64_t> batches_, std::vector<int64_t> nodes_, std::vector<std::vector<double>> us_)
    : batches(std::move(batches_)), nodes(std::move(nodes_)), us(std::move(us_)) {
  expect_rising("batches", batches);
  expect_rising("nodes", nodes);
  std::vector<int64_t> widths;
  for (const auto& row : us) widths.push_back(std::ssize(row));
  if (widths != std::vector<int64_t>(batches.size(), std::ssize(nodes)))
    throw ValueError("RoundCosts: us has rows of " + text_of(widths) + ", expected " + std::to_string(batches.size()) +
                     " of " + std::to_string(nodes.size()));
  for (const auto& row : us)
    for (const double value : row)
      if (!(value > 0 && std::isfinite(value)))
        throw ValueError("RoundCosts: us has " + std::to_string(value) + ", expected times above 0");
}

size_t choose_rung(std::span<const double> accepted, std::span<const double> us) {
  size_t best = 0;
  double best_rate = 0;
  for (size_t rung = 0; rung < us.size(); ++rung) {
    const double rate = (1 + accepted[rung]) / us[rung];
    if (rate > best_rate) {
      best = rung;
      best_rate = rate;
    }
  }
  return best;
}

int64_t choose_num_nodes(int64_t batch, std::span<const double> accepted, const RoundCosts& costs) {
  if (batch < 1) throw ValueError("choose_num_nodes: batch is " + std::to_string(batch) + ", expected at least 1");
  if (accepted.size() != costs.nodes.size())
    throw ValueError("choose_num_nodes: accepted has " + std::to_string(accepted.size()) + " entries, expected " +
                     std::to_string(costs.nodes.size()));
  const auto row = std::ranges::lower_bound(costs.batches, batch) - costs.batches.begin();
  return costs.nodes[choose_rung(accepted, costs.us[std::min<size_t>(row, costs.batches.size() - 1)])];
}

Ladder::Ladder(const std::vector<int64_t>& nodes, int64_t accept_width) : nodes_(nodes) {
  int64_t below = 1;
  for (const int64_t count : nodes_) {
    const int64_t most = std::min(count, accept_width);
    gains_.push_back({static_cast<double>(most - below), kFirstCount});
    below = most;
  }
}

void Ladder::set_costs(RoundCosts costs) {
  us_beyond_.assign(costs.batches.size(), 0);
  costs_ = std::move(costs);
}

std::vector<double> Ladder::accepted() const {
  std::vector<double> accepted;
  double sum = 0;
  for (const Gain& gain : gains_) accepted.push_back(sum += gain.mean);
  return accepted;
}

size_t Ladder::next(size_t row) {
  if (!costs_) return nodes_.size() - 1;
  const std::vector<double> us = costs_now(row);
  const size_t best = choose_rung(accepted(), us);
  us_since_trial_ += us[best];
  if (rounds_to_try_ == 0) {
    if (best + 1 == nodes_.size()) return best;
    trial_ = rung_to_try(us, best);
    if (us_since_trial_ * kTrialShare < kTrialRounds * us[trial_]) return best;
    us_since_trial_ = 0;
    rounds_to_try_ = kTrialRounds;
  }
  --rounds_to_try_;
  return std::max(best, trial_);
}

// The highest that is not dear, since it shows those below it too; at least the next one.
size_t Ladder::rung_to_try(std::span<const double> us, size_t best) {
  size_t rung = us.size() - 1;
  while (rung > best + 1 && us[rung] > kTrialCost * us[best]) --rung;
  return rung;
}

std::vector<double> Ladder::costs_now(size_t row) const {
  std::vector<double> us = costs_->us[row];
  for (double& value : us) value += us_beyond_[row];
  return us;
}

void Ladder::note_time(size_t row, size_t rung, double us) {
  if (!costs_) return;
  const double beyond = std::max(us - costs_->us[row][rung], 0.0);
  us_beyond_[row] += (beyond - us_beyond_[row]) / kMemory;
}

void Ladder::observe(size_t rung, std::span<const int32_t> path) {
  if (gains_.size() == 1) return;  // there is nothing to choose
  size_t at = 0;
  for (size_t i = 0; i <= rung; ++i) {
    Gain& gain = gains_[i];
    const size_t before = at;
    while (at < path.size() && path[at] < nodes_[i]) ++at;
    gain.count = std::min(gain.count + 1, kMemory);
    gain.mean += (static_cast<double>(at - before) - gain.mean) / static_cast<double>(gain.count);
  }
}

}  // namespace specdec::scheduler
