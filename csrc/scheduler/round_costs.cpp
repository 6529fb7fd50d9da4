#include "scheduler/round_costs.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace specdec::scheduler {
namespace {

// A ratio is a mean over about kMemory recent rounds of its level; its weight halves after kHalfLife rounds of other
// levels. At kNear octaves of rows, a neighbor counts 1/e as much, and the prior (a ratio of 1) as much as kPrior
// rounds.
constexpr double kMemory = 16, kHalfLife = 256, kNear = 1, kPrior = 0.25;
// A round is delayed by other work now and then: at most this share of the expected duration is believed of a surprise.
constexpr double kSurprise = 0.25;
// Prior standard deviations of the rates, relative to the cheapest round, which reads the weights and little else: of
// presence, and of a KV row, which is about 1e-5 of the weights of a large model and 1e-4 of those of a small one. Then
// the prior and the bound of growth per row beyond a request's first, relative to attention.
constexpr double kPresence = 0.05, kAttention = 1e-4, kGrowth = 0.02, kMaxGrowth = 0.05;
// Drift of the rates per round, relative to their priors; relative noise of a round's duration.
constexpr double kDrift = 0.005, kNoise = 0.02;

// Returns what the rates are multiplied by in a round with this many KV rows and rows per request.
std::array<double, 3> rate_factors(double kv_rows, double rows_per_request) {
  return {1, kv_rows, kv_rows * (rows_per_request - 1)};
}

double dot(const std::array<double, 3>& a, const std::array<double, 3>& b) {
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
}

bool increases_from(const std::vector<int64_t>& values, int64_t least) {
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
    if (!increases_from(rows[i], batches[i]))
      check.that(false, ("rows[" + std::to_string(i) + "]").c_str(), {"is ", text_of(rows[i])},
                 {"increasing values from ", batches[i], " on, at least a row per request"});
}

RoundCosts::RoundCosts(std::vector<int64_t> batches_, std::vector<std::vector<int64_t>> rows_,
                       std::vector<std::vector<double>> us_, std::vector<double> catch_up_)
    : batches(std::move(batches_)), rows(std::move(rows_)), us(std::move(us_)), catch_up(std::move(catch_up_)) {
  const Check check("RoundCosts");
  check.that(increases_from(batches, 1), "batches", {"is ", text_of(batches)}, "increasing values from 1 on");
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
    for (auto& by_level = nearness_.emplace_back(); const int64_t level : rows)
      for (auto& by_other = by_level.emplace_back(); const int64_t other : rows)
        by_other.push_back(
            std::exp(-std::abs(std::log2(static_cast<double>(other) / static_cast<double>(level))) / kNear));
}

double CostModel::us_without_ratio(size_t size_index, size_t level, double num_requests, double kv_rows) const {
  const double rows = static_cast<double>(costs_.rows[size_index][level]);
  return costs_.us[size_index][level] + dot(rate_factors(kv_rows, rows / num_requests), rates_);
}

// Returns a mean over the levels of this size, weighted by evidence and nearness.
double CostModel::ratio(size_t size_index, size_t level) const {
  const std::vector<double>&ratios = ratios_[size_index], &weights = weights_[size_index];
  double sum = kPrior, weight = kPrior;
  for (size_t i = 0; i < ratios.size(); ++i) {
    if (weights[i] == 0) continue;
    const double near = weights[i] * nearness_[size_index][level][i];
    sum += near * ratios[i];
    weight += near;
  }
  // One round of the level itself counts as much as all of that: re-timing a level is not blurred by the others.
  const double own = weights[level] / (weights[level] + 1);
  return std::lerp(sum / weight, ratios[level], own);
}

double CostModel::expected_us(size_t size_index, size_t level, double num_requests, double kv_rows) const {
  return us_without_ratio(size_index, level, num_requests, kv_rows) * ratio(size_index, level);
}

void CostModel::update(size_t size_index, size_t level, double num_requests, double kv_rows, double us) {
  if (!(us > 0)) return;  // a clock that stood still, or was set back, says nothing about the round
  const double expected = expected_us(size_index, level, num_requests, kv_rows);
  // A machine on which every round takes longer than expected shows that in a few rounds; one late round is nothing.
  us = std::clamp(us, expected * (1 - kSurprise), expected * (1 + kSurprise));
  const auto factors = rate_factors(kv_rows, static_cast<double>(costs_.rows[size_index][level]) / num_requests);
  update_rates(factors, us - us_without_ratio(size_index, level, num_requests, kv_rows), kNoise * us);

  const double decay = std::exp2(-1 / kHalfLife);
  for (auto& each : weights_)
    for (double& weight : each) weight *= decay;
  double& weight = weights_[size_index][level];
  weight = std::min(weight + 1, kMemory);
  double& own = ratios_[size_index][level];
  own += (us / us_without_ratio(size_index, level, num_requests, kv_rows) - own) / weight;
}

// Makes one step of a Kalman filter with drifting states, after a round that took `surprise` longer than the rates say.
void CostModel::update_rates(const std::array<double, 3>& factors, double surprise, double error) {
  for (size_t i = 0; i < 3; ++i) {
    covariances_[i][i] += kDrift * kDrift * priors_[i] * priors_[i];
    const double most = priors_[i] * priors_[i], scale = std::sqrt(std::min(most / covariances_[i][i], 1.0));
    for (size_t j = 0; j < 3; ++j) {  // a rate is never less certain than before any round
      covariances_[i][j] *= scale;
      covariances_[j][i] *= scale;
    }
  }
  std::array<double, 3> with_round;  // covariances of the rates with the round's duration
  for (size_t i = 0; i < 3; ++i) with_round[i] = dot(covariances_[i], factors);
  const double variance = dot(with_round, factors) + error * error;
  for (size_t i = 0; i < 3; ++i) {
    rates_[i] += with_round[i] * surprise / variance;
    for (size_t j = 0; j < 3; ++j) covariances_[i][j] -= with_round[i] * with_round[j] / variance;
  }
  // More rows never read less KV, nor all of it again. A rate that is clamped at its bound moves the others by their
  // covariance with it: left in place, they would compensate for a value that it does not have.
  const auto hold = [&](size_t i, double low, double high) {
    const double shift = std::clamp(rates_[i], low, high) - rates_[i];
    if (shift == 0) return;
    const std::array<double, 3> covariance = covariances_[i];
    for (size_t j = 0; j < 3; ++j) rates_[j] += covariance[j] / covariance[i] * shift;
  };
  constexpr double kNoBound = std::numeric_limits<double>::infinity();
  hold(1, 0, kNoBound);
  hold(2, 0, kMaxGrowth * std::max(rates_[1], 0.0));
  hold(0, -2 * priors_[0], kNoBound);
  rates_[1] = std::max(rates_[1], 0.0);
  rates_[2] = std::clamp(rates_[2], 0.0, kMaxGrowth * rates_[1]);
}

}  // namespace specdec::scheduler
