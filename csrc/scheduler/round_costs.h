// Models what rounds cost: measured once, with requests of short texts, and updated from the rounds that run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/check.h"

namespace specdec::scheduler {

// Formats values as "[1, 2, 4]", for messages.
std::string text_of(const std::vector<int64_t>& values);

// Throws ValueError unless `rows` has, for each of the increasing batch sizes, increasing budget levels that begin at
// the batch size or above.
void check_rows(const Check& check, const char* batches_name, const std::vector<int64_t>& batches,
                const std::vector<std::vector<int64_t>>& rows);

// Holds the cost of each budget level on the machine that runs the rounds. Throws ValueError for values that cannot be.
struct RoundCosts {
  RoundCosts(std::vector<int64_t> batches, std::vector<std::vector<int64_t>> rows, std::vector<std::vector<double>> us,
             std::vector<double> catch_up = {});

  std::vector<int64_t> batches;            // increasing batch sizes; a round with fewer requests runs at the next size
  std::vector<std::vector<int64_t>> rows;  // budget levels of each size: increasing rows, at least the batch size
  std::vector<std::vector<double>> us;     // of each level
  std::vector<double> catch_up;            // us for which the draft of each size catches up; empty: it is never idle
};

// Predicts the cost of a round with any requests. Measured rounds have short texts: they lack attention over longer
// ones, and the experts that more distinct tokens touch. A round takes about
//
//   (measured + presence + kv_rows * (attention + growth * (rows / requests - 1))) * ratio
//
// where kv_rows is the sum of the requests' lengths. `presence` is the additional cost of having any KV, however
// little. The three rates are shared by rounds of all sizes and estimated by a Kalman filter; the ratio is what remains
// at each level. A level that has not run recently takes the ratios of levels nearby.
class CostModel {
 public:
  explicit CostModel(RoundCosts costs);

  const RoundCosts& measured() const { return costs_; }

  // Returns the expected microseconds of a round of this many requests with this many KV rows in all.
  double expected_us(size_t size_index, size_t level, double num_requests, double kv_rows) const;
  // Records the duration of a round.
  void update(size_t size_index, size_t level, double num_requests, double kv_rows, double us);
  // Returns how many recent rounds the ratio of a level is based on; 0 if it is taken from the levels nearby.
  double evidence(size_t size_index, size_t level) const { return weights_[size_index][level]; }

 private:
  double us_without_ratio(size_t size_index, size_t level, double num_requests, double kv_rows) const;
  double ratio(size_t size_index, size_t level) const;
  void update_rates(const std::array<double, 3>& factors, double surprise, double error);

  const RoundCosts costs_;
  std::array<double, 3> rates_ = {};  // presence in us, attention and growth in us per KV row
  std::array<double, 3> priors_;      // standard deviations of the rates before any round
  std::array<std::array<double, 3>, 3> covariances_ = {};
  std::vector<std::vector<double>> ratios_, weights_;       // [size][level]
  std::vector<std::vector<std::vector<double>>> nearness_;  // [size][level][level]: how much one says about the other
};

}  // namespace specdec::scheduler
