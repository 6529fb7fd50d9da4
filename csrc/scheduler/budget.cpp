#include "scheduler/budget.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace specdec::scheduler {
namespace {

// What scores promise is a mean over so many latest requests' rounds, or over so many rounds where the batch is large:
// enough to tell apart what matters (a standard error of about 6 % at usual accept lengths), few enough to follow a
// text that changes. How true they are needs more, since a round shows no more of that than how many drafts were
// accepted.
constexpr double kMemory = 32, kMemoryOfTruth = 256, kRounds = 2;
// Drafts are taken to be as good as they can be as if that had been seen a few times: what rows do not bring is seen as
// soon as they are tried, and what they would bring is not seen from below.
constexpr double kHope = 4;
// A cell of which little is known is as true as the one before, as if it had been seen for so many tokens: scores are
// calibrated, so what one cell shows is mostly chance. Those that promise too little are corrected up to kMostTruth.
constexpr double kGuess = 4, kMostTruth = 2;
// Shares of the time that trials of a dearer rung take and, were they to bring nothing, lose; and looks at the cost of
// a lower one, whose worth is known. A trial has so many rounds (the first may show nothing of its rung), and a round
// of it costs so much more than the best at most where several are above it.
constexpr double kTrialShare = 1.0 / 64, kLostShare = 1.0 / 128, kLookShare = 1.0 / 128, kLostByLooks = 1.0 / 512;
constexpr int kTrialRounds = 2;
constexpr double kTrialCost = 2;
// A higher rung than that of the round before has to be so much better.
constexpr double kBetter = 1.005;

// The value at x of a curve through (1, 0) and these points, straight on beyond them.
double interpolated(double x, std::span<const double> xs, std::span<const double> ys) {
  double x0 = 1, y0 = 0, slope = 0;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (xs[i] <= x0) continue;  // a rung of one row a request
    slope = (ys[i] - y0) / (xs[i] - x0);
    if (x <= xs[i]) break;
    x0 = xs[i];
    y0 = ys[i];
  }
  return y0 + slope * (x - x0);
}

// Rows that a request may have at most, of any batch size.
double most_rows(const std::vector<int64_t>& batches, const std::vector<std::vector<int64_t>>& rows) {
  double most = 1;
  for (size_t i = 0; i < batches.size(); ++i)
    most = std::max(most, static_cast<double>(rows[i].back()) / static_cast<double>(batches[i]));
  return most;
}

}  // namespace

Worth::Worth(double most_rows, int64_t accept_width) : most_(static_cast<double>(accept_width - 1)) {
  // Four cells to each doubling: rungs lie further apart.
  for (double begin = 1, octave = 1; begin < most_rows; octave *= 2)
    for (int quarter = 1; quarter <= 4 && begin < most_rows; ++quarter) {
      begin = octave * (1 + quarter / 4.0);
      cells_.push_back({.end = begin});
    }
}

void Worth::note(double requests, std::span<const double> rows, std::span<const double> expected,
                 std::span<const double> realised) {
  const double share = requests / std::max(kMemoryOfTruth, kRounds * requests);
  const double known = rows[realised.size() - 1];
  double begin = 1;
  for (Cell& cell : cells_) {
    if (begin >= rows.back()) break;
    const auto rise = [&](std::span<const double> gains) {
      const auto of = rows.first(gains.size());
      return std::max(interpolated(cell.end, of, gains) - interpolated(begin, of, gains), 0.0);
    };
    const double promised = rise(expected);
    cell.latest = std::min(cell.latest + requests, std::max(kMemory, kRounds * requests));
    cell.promised += (promised - cell.promised) * (requests / cell.latest);
    cell.seen += requests;
    if (begin < known) {
      cell.promises += requests * rise(expected.first(realised.size())) - share * cell.promises;
      cell.kept += requests * rise(realised) - share * cell.kept;
    }
    begin = cell.end;
  }
}

double Worth::at(double rows) const {
  double gain = 0, begin = 1, truth = 1, slope = 1;
  for (const Cell& cell : cells_) {
    if (begin >= rows) break;
    const double width = cell.end - begin;
    truth = std::min((cell.kept + kGuess * truth) / (cell.promises + kGuess), kMostTruth);
    const double known = truth * cell.promised, hope = std::min(slope * width, most_ - gain);
    const double rise = std::lerp(known, std::max(hope, known), kHope / (kHope + cell.seen));
    gain += rise * std::min((rows - begin) / width, 1.0);
    slope = rise / width;
    begin = cell.end;
  }
  return gain;
}

Budget::Budget(const std::vector<int64_t>& batches, std::vector<std::vector<int64_t>> rows, int64_t accept_width,
               int64_t rest_rows)
    : batches_(batches),
      rows_(std::move(rows)),
      rest_rows_(static_cast<double>(rest_rows)),
      worth_(most_rows(batches, rows_), accept_width),
      last_(rows_.size()) {}

void Budget::set_costs(RoundCosts costs) { model_.emplace(std::move(costs)); }

// Rows that each request has of a round. A row for each of the batch has no room for drafts, whoever is absent.
double Budget::rows_each(size_t size, size_t rung, double requests) const {
  const int64_t rows = rows_[size][rung];
  return rows == batches_[size] ? 1 : static_cast<double>(rows) / requests;
}

double Budget::tokens(size_t size, size_t rung, double requests) const {
  return 1 + worth_.at(rows_each(size, rung, requests));
}

// What it costs to catch up now, beyond what it costs to rest on: then a draft that is further behind is sooner due.
double Budget::catching_up(size_t size, double behind) const {
  const std::vector<double>& us = model_->measured().catch_up;
  return us.empty() || behind == 0 ? 0 : us[size] * std::max(1 - behind / rest_rows_, 0.0);
}

size_t Budget::next(size_t size, double requests, double kv_rows, double behind) {
  const size_t count = rows_[size].size();
  if (!model_ || count == 1) return count - 1;
  std::vector<double> us, gains;
  for (size_t rung = 0; rung < count; ++rung) {
    us.push_back(model_->expected(size, rung, requests, kv_rows));
    gains.push_back(tokens(size, rung, requests));
  }
  if (const std::vector<double>& catch_up = model_->measured().catch_up; !catch_up.empty())
    us[0] += catch_up[size] / rest_rows_;
  const double to_catch_up = catching_up(size, behind);
  const auto rate = [&](size_t rung) { return gains[rung] / us[rung]; };
  size_t best = 0;
  for (size_t rung = 1; rung < count; ++rung)
    if (rate(rung) > rate(best)) best = rung;
  if (best > last_[size] && rate(best) <= kBetter * rate(last_[size])) best = last_[size];
  // Who rents until the rent has come to the price, and buys then, pays no more than twice what was best.
  if (best == 0 || to_catch_up == 0)
    us_lost_at_rest_ = 0;
  else if ((us_lost_at_rest_ += us[0] * std::max(rate(best) / rate(0) - 1, 0.0)) < to_catch_up)
    best = 0;
  last_[size] = best;

  us_since_trial_ += us[best];
  us_since_look_ += us[best];
  if (rounds_to_try_ > 0 && size_of_trial_ != size) {
    // The batch has changed amid a trial, whose last round shows nothing unless it follows the one before: it is of
    // this size, and paid for afterwards.
    size_of_trial_ = size;
    trial_ = std::min(trial_, rung_to_try(us, best));
    if (trial_ > best)
      us_since_trial_ -= std::max(us[trial_] / kTrialShare, (us[trial_] - 1 / rate(best)) / kLostShare);
  }
  if (rounds_to_try_ == 0) {
    if (const auto rung = rung_to_look_at(size, best, us, gains)) {
      const double lost = us[*rung] - gains[*rung] / rate(best) + (*rung == 0 ? catching_up(size, 1) : 0);
      if (us_since_look_ * kLookShare >= us[*rung] && us_since_look_ * kLostByLooks >= lost) {
        us_since_look_ = 0;
        return *rung;
      }
    }
    if (best + 1 == count) return best;
    trial_ = rung_to_try(us, best);
    const double lost = us[trial_] - 1 / rate(best);  // as if it brought a token a request
    if (us_since_trial_ * kTrialShare < kTrialRounds * us[trial_] + to_catch_up ||
        us_since_trial_ * kLostShare < kTrialRounds * lost + to_catch_up)
      return best;
    us_since_trial_ = 0;
    size_of_trial_ = size;
    rounds_to_try_ = kTrialRounds;
  }
  --rounds_to_try_;
  return std::max(best, std::min(trial_, count - 1));
}

// The highest that is not dear, since it shows those below it too; at least the next one.
size_t Budget::rung_to_try(std::span<const double> us, size_t best) {
  size_t rung = us.size() - 1;
  while (rung > best + 1 && us[rung] > kTrialCost * us[best]) --rung;
  return rung;
}

// Of the lower rungs that would be the best at what was measured, the one that has not run for longest: what it costs
// by now is not seen from above.
std::optional<size_t> Budget::rung_to_look_at(size_t size, size_t best, std::span<const double> us,
                                              std::span<const double> gains) const {
  std::optional<size_t> oldest;
  for (size_t rung = 0; rung < best; ++rung)
    if (gains[rung] / model_->measured().us[size][rung] > gains[best] / us[best] &&
        (!oldest || model_->evidence(size, rung) < model_->evidence(size, *oldest)))
      oldest = rung;
  return oldest;
}

void Budget::note_time(size_t size, size_t rung, double requests, double kv_rows, double us) {
  if (model_) model_->note(size, rung, requests, kv_rows, us);
}

void Budget::note_tokens(size_t size, double requests, std::span<const double> expected,
                         std::span<const double> realised) {
  std::vector<double> rows, by_scores, in_truth;
  for (size_t rung = 0; rung < expected.size(); ++rung) {
    rows.push_back(rows_each(size, rung, requests));
    by_scores.push_back(expected[rung] / requests);
    if (rung < realised.size()) in_truth.push_back(realised[rung] / requests);
  }
  worth_.note(requests, rows, by_scores, in_truth);
}

}  // namespace specdec::scheduler
