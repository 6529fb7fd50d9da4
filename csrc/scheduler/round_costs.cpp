#include "scheduler/round_costs.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/errors.h"

namespace specdec::scheduler {
namespace {

// A ratio is a mean over about this many latest rounds; what a rung showed is half forgotten after kHalfLife rounds of
// others. Behind kNear octaves of rows a neighbour counts 1/e as much, and the guess that a ratio is 1 as much as
// kGuess rounds.
constexpr double kMemory = 16, kHalfLife = 256, kNear = 1, kGuess = 0.25;
// A round waits for others' work now and then: of a surprise no more than this share of the round is believed.
constexpr double kSurprise = 0.25;
// Of the rates, in parts of what the first round suggests: how much growth with rows may be, how far both drift in a
// round, and how far off a round is that is as it should be.
constexpr double kGrowth = 0.02, kDrift = 0.005, kNoise = 0.02;

void expect(bool holds, const std::string& what, const std::string& expected) {
  if (!holds) throw ValueError("RoundCosts: " + what + ", expected " + expected);
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

RoundCosts::RoundCosts(std::vector<int64_t> batches_, std::vector<std::vector<int64_t>> rows_,
                       std::vector<std::vector<double>> us_)
    : batches(std::move(batches_)), rows(std::move(rows_)), us(std::move(us_)) {
  expect(rises_from(batches, 1), "batches is " + text_of(batches), "rising numbers from 1 on");
  expect(rows.size() == batches.size(), "rows has " + std::to_string(rows.size()) + " lists",
         std::to_string(batches.size()) + " like batches");
  std::vector<int64_t> widths, given;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string from = std::to_string(batches[i]);
    expect(rises_from(rows[i], batches[i]), "rows[" + std::to_string(i) + "] is " + text_of(rows[i]),
           "rising numbers from " + from + " on, a row for each request");
    widths.push_back(std::ssize(rows[i]));
  }
  for (const auto& each : us) given.push_back(std::ssize(each));
  expect(given == widths, "us has lists of " + text_of(given), text_of(widths) + " like rows");
  for (const auto& each : us)
    for (const double value : each)
      expect(value > 0 && std::isfinite(value), "us has " + std::to_string(value), "times above 0");
}

CostModel::CostModel(RoundCosts costs) : costs_(std::move(costs)) {
  for (const auto& each : costs_.us) {
    ratios_.emplace_back(each.size(), 1);
    weights_.emplace_back(each.size(), 0);
  }
}

double CostModel::without_ratio(size_t size, size_t rung, double requests, double kv_rows) const {
  const double rows = static_cast<double>(costs_.rows[size][rung]);
  return costs_.us[size][rung] + kv_rows * (attention_ + growth_ * (rows / requests - 1));
}

// A mean over the rungs of this size, those near this one before all.
double CostModel::ratio(size_t size, size_t rung) const {
  const auto octaves = [&](size_t i) { return std::log2(static_cast<double>(costs_.rows[size][i])); };
  double sum = kGuess, weight = kGuess;
  for (size_t i = 0; i < ratios_[size].size(); ++i) {
    if (weights_[size][i] == 0) continue;
    const double near = weights_[size][i] * std::exp(-std::abs(octaves(i) - octaves(rung)) / kNear);
    sum += near * ratios_[size][i];
    weight += near;
  }
  // What the rung itself has shown is not blurred by the others.
  const double own = weights_[size][rung] / kMemory;
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
  const double growth = static_cast<double>(costs_.rows[size][rung]) / requests - 1;
  if (kv_rows > 0) learn_rates(us - without_ratio(size, rung, requests, kv_rows), kNoise * us, kv_rows, growth);

  const double fading = std::exp2(-1 / kHalfLife);
  for (auto& each : weights_)
    for (double& weight : each) weight *= fading;
  double& weight = weights_[size][rung];
  weight = std::min(weight + 1, kMemory);
  double& own = ratios_[size][rung];
  own += (us / without_ratio(size, rung, requests, kv_rows) - own) / weight;
}

// One step of a Kalman filter whose two states drift, after a round that took `surprise` longer than by the rates.
void CostModel::learn_rates(double surprise, double error, double kv_rows, double growth) {
  const double scale = error / kNoise / kv_rows;  // a rate that would explain all of a round
  const double of_growth = kGrowth * scale;
  if (var_attention_ == 0) {
    var_attention_ = scale * scale;
    var_growth_ = of_growth * of_growth;
  }
  var_attention_ = std::min(var_attention_ + kDrift * kDrift * scale * scale, scale * scale);
  var_growth_ = std::min(var_growth_ + kDrift * kDrift * of_growth * of_growth, of_growth * of_growth);
  const double most = std::sqrt(var_attention_ * var_growth_);
  covariance_ = std::clamp(covariance_, -most, most);

  const double a = kv_rows, b = kv_rows * growth;
  const double to_attention = var_attention_ * a + covariance_ * b, to_growth = covariance_ * a + var_growth_ * b;
  const double variance = a * to_attention + b * to_growth + error * error;
  attention_ = std::max(attention_ + to_attention * surprise / variance, 0.0);
  growth_ = std::max(growth_ + to_growth * surprise / variance, 0.0);  // more rows never read less
  var_attention_ -= to_attention * to_attention / variance;
  var_growth_ -= to_growth * to_growth / variance;
  covariance_ -= to_attention * to_growth / variance;
}

}  // namespace specdec::scheduler
