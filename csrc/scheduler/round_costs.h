// What rounds cost: measured once, with requests of little text, and corrected by what they take as they run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/check.h"

namespace specdec::scheduler {

// "[1, 2, 4]", for messages.
std::string text_of(const std::vector<int64_t>& values);

// Throws ValueError unless `rows` has rising totals of rows for each of the rising batch sizes, from the batch on.
void check_rows(const Check& check, const char* batches_name, const std::vector<int64_t>& batches,
                const std::vector<std::vector<int64_t>>& rows);

// What a round costs on the machine that runs it. Throws ValueError for what cannot be.
struct RoundCosts {
  RoundCosts(std::vector<int64_t> batches, std::vector<std::vector<int64_t>> rows, std::vector<std::vector<double>> us,
             std::vector<double> catch_up = {});

  std::vector<int64_t> batches;            // rising batch sizes; of a round with fewer requests, the next one counts
  std::vector<std::vector<int64_t>> rows;  // of each size the rungs: rising totals of rows, no fewer than the batch
  std::vector<std::vector<double>> us;     // of each rung
  std::vector<double> catch_up;            // us in which the draft of each size catches up; none: it never rests
};

// The costs of rounds of any requests. Those that were measured had short texts: what is lacking is attention over
// longer ones, and the experts that more different tokens touch. A round takes about
//
//   (measured + presence + kv_rows * (attention + growth * (rows / requests - 1))) * ratio
//
// in which kv_rows is the sum of the requests' lengths. `presence` is what it takes more to have any KV, however
// little. The three are the same for rounds of all sizes, and follow from these by a Kalman filter; the ratio is what
// is left over at each rung. A rung that did not run lately has the ratios of those nearby.
class CostModel {
 public:
  explicit CostModel(RoundCosts costs);

  const RoundCosts& measured() const { return costs_; }

  // Microseconds of a round with so many requests, whose KV has so many rows.
  double expected(size_t size, size_t rung, double requests, double kv_rows) const;
  // A round took so long.
  void note(size_t size, size_t rung, double requests, double kv_rows, double us);
  // How many of the latest rounds the ratio of a rung stands on, 0 where it stands on its neighbours'.
  double evidence(size_t size, size_t rung) const { return weights_[size][rung]; }

 private:
  double without_ratio(size_t size, size_t rung, double requests, double kv_rows) const;
  double ratio(size_t size, size_t rung) const;
  void learn_rates(const std::array<double, 3>& shares, double surprise, double error);

  const RoundCosts costs_;
  std::array<double, 3> rates_ = {};  // presence in us, attention and growth in us a row of KV
  std::array<double, 3> priors_;      // standard deviations of these before any round
  std::array<std::array<double, 3>, 3> covariances_ = {};
  std::vector<std::vector<double>> ratios_, weights_;       // [size][rung]
  std::vector<std::vector<std::vector<double>>> nearness_;  // [size][rung][rung]: how much one says of the other
};

}  // namespace specdec::scheduler
