#include "scheduler/round_costs.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace specdec::scheduler {
namespace {

// A ratio is a mean over about this many latest rounds; what a rung showed is half forgotten after kHalfLife rounds of
// others. Behind kNear octaves of rows a neighbour counts 1/e as much, and the guess that a ratio is 1 as much as
// kGuess rounds.
constexpr double kMemory = 16, kHalfLife = 256, kNear = 1, kGuess = 0.25;
// A round waits for others' work now and then: of a surprise no more than this share of the round is believed.
constexpr double kSurprise = 0.25;
// What may be expected, in parts of the cheapest round, which reads the weights and little else: of presence, and of a
// row of KV, which is some 1e-5 of the weights of a large model and 1e-4 of those of a small one; and how much more of
// that each row beyond a request's first takes, and takes at most.
constexpr double kPresence = 0.05, kAttention = 1e-4, kGrowth = 0.02, kMostGrowth = 0.05;
// How far the rates drift in a round, in parts of that, and how far off a round is that is as it should be.
constexpr double kDrift = 0.005, kNoise = 0.02;

// What the rates are multiplied by in a round of so much KV and so many rows for each request.
std::array<double, 3> shares_of(double kv_rows, double rows_each) { return {1, kv_rows, kv_rows * (rows_each - 1)}; }

double dot(const std::array<double, 3>& a, const std::array<double, 3>& b) {
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
}

bool rises_from(const std::vector<int64_t>& values, int64_t least) {
  return !values.empty() && values.front() >= least &&
         std::ranges::adjacent_find(values, std::greater_equal<>()) == values.end();
}

}  // namespace

std::string text_of(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

void check_rows(const Check& check, const char* batches_name, const std::vector<int64_t>& batches,
                const std::vector<std::vector<int64_t>>& rows) {
  check.that(rows.size() == batches.size(), "rows", {"has ", rows.size(), " lists"},
             {batches.size(), " like ", batches_name});
  for (size_t i = 0; i < rows.size(); ++i)
    if (!rises_from(rows[i], batches[i]))
      check.that(false, ("rows[" + std::to_string(i) + "]").c_str(), {"is ", text_of(rows[i])},
                 {"rising numbers from ", batches[i], " on, a row for each request"});
}

RoundCosts::RoundCosts(std::vector<int64_t> batches_, std::vector<std::vector<int64_t>> rows_,
                       std::vector<std::vector<double>> us_, std::vector<double> catch_up_)
    : batches(std::move(batches_)), rows(std::move(rows_)), us(std::move(us_)), catch_up(std::move(catch_up_)) {
  const Check check("RoundCosts");
  check.that(rises_from(batches, 1), "batches", {"is ", text_of(batches)}, "rising numbers from 1 on");
  check_rows(check, "batches", batches, rows);
  std::vector<int64_t> widths, given;
  for (const auto& each : rows) widths.push_back(std::ssize(each));
  for (const auto& each : us) given.push_back(std::ssize(each));
  check.that(given == widths, "us", {"has lists of ", text_of(given)}, {text_of(widths), " like rows"});
  for (const auto& each : us)
    for (const double value : each)
      check.that(value > 0 && std::isfinite(value), "us", {"has ", value}, "times above 0");
  check.that(catch_up.empty() || catch_up.size() == batches.size(), "catch_up", {"has ", catch_up.size()},
             {batches.size(), " like batches, or none"});
  for (const double value : catch_up)
    check.that(value > 0 && std::isfinite(value), "catch_up", {"has ", value}, "times above 0");
}

CostModel::CostModel(RoundCosts costs) : costs_(std::move(costs)) {
  const double cheapest = costs_.us[0][0], attention = kAttention * cheapest;
  priors_ = {kPresence * cheapest, attention, kGrowth * attention};
  for (size_t i = 0; i < 3; ++i) covariances_[i][i] = priors_[i] * priors_[i];
  for (const auto& each : costs_.us) {
    ratios_.emplace_back(each.size(), 1);
    weights_.emplace_back(each.size(), 0);
  }
  for (const auto& rows : costs_.rows)
    for (auto& of_size = nearness_.emplace_back(); const int64_t rung : rows)
      for (auto& of_rung = of_size.emplace_back(); const int64_t other : rows)
        of_rung.push_back(
            std::exp(-std::abs(std::log2(static_cast<double>(other) / static_cast<double>(rung))) / kNear));
}

double CostModel::without_ratio(size_t size, size_t rung, double requests, double kv_rows) const {
  const double rows = static_cast<double>(costs_.rows[size][rung]);
  return costs_.us[size][rung] + dot(shares_of(kv_rows, rows / requests), rates_);
}

// A mean over the rungs of this size, those near this one before all.
double CostModel::ratio(size_t size, size_t rung) const {
  double sum = kGuess, weight = kGuess;
  for (size_t i = 0; i < ratios_[size].size(); ++i) {
    if (weights_[size][i] == 0) continue;
    const double near = weights_[size][i] * nearness_[size][rung][i];
    sum += near * ratios_[size][i];
    weight += near;
  }
  // One round of the rung itself says as much as all of that: a look at it is not blurred by the others.
  const double own = weights_[size][rung] / (weights_[size][rung] + 1);
  return std::lerp(sum / weight, ratios_[size][rung], own);
}

double CostModel::expected(size_t size, size_t rung, double requests, double kv_rows) const {
  return without_ratio(size, rung, requests, kv_rows) * ratio(size, rung);
}

void CostModel::note(size_t size, size_t rung, double requests, double kv_rows, double us) {
  if (!(us > 0)) return;  // a clock that stood still, or was set back, says nothing of the round
  const double now = expected(size, rung, requests, kv_rows);
  // A machine on which every round takes longer than it ought to shows that in a few rounds; one late round is nothing.
  us = std::clamp(us, now * (1 - kSurprise), now * (1 + kSurprise));
  const auto shares = shares_of(kv_rows, static_cast<double>(costs_.rows[size][rung]) / requests);
  learn_rates(shares, us - without_ratio(size, rung, requests, kv_rows), kNoise * us);

  const double fading = std::exp2(-1 / kHalfLife);
  for (auto& each : weights_)
    for (double& weight : each) weight *= fading;
  double& weight = weights_[size][rung];
  weight = std::min(weight + 1, kMemory);
  double& own = ratios_[size][rung];
  own += (us / without_ratio(size, rung, requests, kv_rows) - own) / weight;
}

// One step of a Kalman filter whose states drift, after a round that took `surprise` longer than by the rates.
void CostModel::learn_rates(const std::array<double, 3>& shares, double surprise, double error) {
  for (size_t i = 0; i < 3; ++i) {
    covariances_[i][i] += kDrift * kDrift * priors_[i] * priors_[i];
    const double most = priors_[i] * priors_[i], scale = std::sqrt(std::min(most / covariances_[i][i], 1.0));
    for (size_t j = 0; j < 3; ++j) {  // a rate is never less certain than before any round
      covariances_[i][j] *= scale;
      covariances_[j][i] *= scale;
    }
  }
  std::array<double, 3> with_round;  // covariances of the rates with what the round takes
  for (size_t i = 0; i < 3; ++i) with_round[i] = dot(covariances_[i], shares);
  const double variance = dot(with_round, shares) + error * error;
  for (size_t i = 0; i < 3; ++i) {
    rates_[i] += with_round[i] * surprise / variance;
    for (size_t j = 0; j < 3; ++j) covariances_[i][j] -= with_round[i] * with_round[j] / variance;
  }
  // More rows never read less, nor all of it again. A rate that is held at its bound takes the others along, as far as
  // they go together: left where they are, they would make up for a rate that it does not have.
  const auto hold = [&](size_t i, double low, double high) {
    const double shift = std::clamp(rates_[i], low, high) - rates_[i];
    if (shift == 0) return;
    const std::array<double, 3> together = covariances_[i];
    for (size_t j = 0; j < 3; ++j) rates_[j] += together[j] / together[i] * shift;
  };
  constexpr double kNoBound = std::numeric_limits<double>::infinity();
  hold(1, 0, kNoBound);
  hold(2, 0, kMostGrowth * std::max(rates_[1], 0.0));
  hold(0, -2 * priors_[0], kNoBound);
  rates_[1] = std::max(rates_[1], 0.0);
  rates_[2] = std::clamp(rates_[2], 0.0, kMostGrowth * rates_[1]);
}

}  // namespace specdec::scheduler
