// How many rows a round gets: as many as pay for themselves at its batch.
//
// A row more costs every request of the batch, and brings what it is accepted for. The rungs of a batch size are totals
// of rows, from one a request (plain decoding) on. What a rung costs is measured, and corrected as rounds run
// (round_costs.h). What it brings is learnt from rounds: of each, what every rung would have brought by the draft's own
// scores, and what it would have brought in truth, as far as the round shows that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "scheduler/round_costs.h"

namespace specdec::scheduler {

// What a request gains beyond its own token in a round that has so many rows for it: a curve over rows a request, which
// is the same for all batch sizes, so that a batch that changes keeps what was learnt. It rises by cells. Each has the
// mean of what the scores promise of it, times how much of that came true. What was hardly seen is as good as it can
// be: a row brings no more than those before it, and all of them no more than the longest path.
class Worth {
 public:
  // At most so many rows a request, and so many tokens.
  Worth(double most_rows, int64_t accept_width);

  // A round of so many requests: what one of them gains at these rows a request (rising, from 1 on), by the scores, and
  // at the first of them in truth. Of rows beyond the last of these nothing is learnt.
  void note(double requests, std::span<const double> rows, std::span<const double> expected,
            std::span<const double> realised);
  double at(double rows) const;

 private:
  struct Cell {
    double end;                     // rows a request; it begins where the one before ends, the first at 1
    double promised = 0;            // a mean over the latest requests' rounds
    double latest = 0;              // how many of these count in it: it follows a text that changes
    double seen = 0;                // how many there have been, with which hope fades
    double promises = 0, kept = 0;  // sums that forget, of rounds that showed both
  };
  const double most_;  // drafts that a round gives a request
  std::vector<Cell> cells_;
};

class Budget {
 public:
  // Of each batch size the rungs, as in RoundCosts; a round gives a request `accept_width` tokens at most. A draft that
  // rests in rounds of the lowest rung catches up at least once in `rest_rows` of them.
  Budget(const std::vector<int64_t>& batches, std::vector<std::vector<int64_t>> rows, int64_t accept_width,
         int64_t rest_rows = 0);

  // Until there are costs, every round is of the highest rung.
  void set_costs(RoundCosts costs);
  std::optional<RoundCosts> costs() const { return model_ ? std::optional(model_->measured()) : std::nullopt; }

  // The rung of the next round of this size, for so many requests whose KV has so many rows: that of most tokens a
  // microsecond. Now and then a higher one is tried, whose worth is not seen from below: that takes no more than 1/64
  // of the time, and loses no more than 1/128. And one looks at a lower one whose cost may have changed. Where a
  // request's draft is `behind` by so many rounds, whatever drafts has to catch up first: that is paid for by what
  // resting has lost by then, of which no more is lost than catching up takes.
  size_t next(size_t size, double requests, double kv_rows, double behind = 0);

  // A round took so long.
  void note_time(size_t size, size_t rung, double requests, double kv_rows, double us);

  // What a round of this size showed of the first rungs, one at least: drafts that each was expected to bring so many
  // requests by their scores, and would have brought in truth, which may be of fewer rungs.
  void note_tokens(size_t size, double requests, std::span<const double> expected, std::span<const double> realised);

  // Tokens that a round of this rung is expected to give a request.
  double tokens(size_t size, size_t rung, double requests) const;

 private:
  double rows_each(size_t size, size_t rung, double requests) const;
  static size_t rung_to_try(std::span<const double> us, size_t best);
  std::optional<size_t> rung_to_look_at(size_t size, size_t best, std::span<const double> us,
                                        std::span<const double> gains) const;
  double catching_up(size_t size, double behind) const;

  const std::vector<int64_t> batches_;
  const std::vector<std::vector<int64_t>> rows_;
  const double rest_rows_;
  Worth worth_;
  std::optional<CostModel> model_;
  std::vector<size_t> last_;  // of each size, the rung chosen last
  double us_since_trial_ = 0, us_since_look_ = 0;
  double us_lost_at_rest_ = 0;  // since a higher rung is the best
  size_t size_of_trial_ = 0, trial_ = 0;
  int rounds_to_try_ = 0;
};

}  // namespace specdec::scheduler
