// How many nodes a round's trees get: as many as pay for themselves at its batch.
//
// A node more costs every row of the batch, and brings what it is accepted for. What it costs is measured, a rung (a
// number of nodes) at each batch size. What it brings is learnt from the rounds: nodes stand best first, so that the
// tree of a lower rung is the first nodes of a higher one's, and a round shows for its own rung and all below what they
// would have accepted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace specdec::scheduler {

// What a round costs on the machine that runs it. Throws ValueError for what cannot be.
struct RoundCosts {
  RoundCosts(std::vector<int64_t> batches, std::vector<int64_t> nodes, std::vector<std::vector<double>> us);

  std::vector<int64_t> batches;         // rising numbers of rows; of a round with fewer, the next one counts
  std::vector<int64_t> nodes;           // rising numbers of nodes, root included
  std::vector<std::vector<double>> us;  // [batches][nodes]
};

// The rung that promises most tokens a microsecond, of equal ones the lowest. A round of rung r gives a request one
// token, and accepted[r] more, and takes us[r].
size_t choose_rung(std::span<const double> accepted, std::span<const double> us);

// The same as a number of nodes. Throws ValueError.
int64_t choose_num_nodes(int64_t batch, std::span<const double> accepted, const RoundCosts& costs);

class Ladder {
 public:
  // A round gives a request `accept_width` tokens at most.
  Ladder(const std::vector<int64_t>& nodes, int64_t accept_width);

  // Until there are costs, every round is of the highest rung.
  void set_costs(RoundCosts costs);
  const std::optional<RoundCosts>& costs() const { return costs_; }

  // The rung of the next round at costs.batches[row]. Now and then it is one above the best, twice in a row: what that
  // brings is not seen from below, and may have become more. Such rounds take 1/64 of the time.
  size_t next(size_t row);

  // A round took so long. What it took beyond its costs, for attention over the prefixes of its requests, counts for
  // all rungs of its batch size: each reads the same KV.
  void note_time(size_t row, size_t rung, double us);

  // A request's round at this rung or a higher one. `path` are the nodes it accepted, rising, without the root. Of
  // rungs above the round's before nothing is learnt: where few nodes ended, a larger tree often begins amid a piece
  // that it would have taken whole, and looks worse than it is.
  void observe(size_t rung, std::span<const int32_t> path);

  // Drafts that a tree of each rung is expected to have accepted.
  std::vector<double> accepted() const;

 private:
  // What a rung accepts beyond the one below it: a mean over requests and rounds, in which the latest count most.
  struct Gain {
    double mean;
    int64_t count;
  };

  static size_t rung_to_try(std::span<const double> us, size_t best);
  std::vector<double> costs_now(size_t row) const;

  const std::vector<int64_t> nodes_;
  std::vector<Gain> gains_;  // of each rung; the lowest has what its nodes bring beyond the root
  std::optional<RoundCosts> costs_;
  std::vector<double> us_beyond_;  // [batches]
  double us_since_trial_ = 0;
  size_t trial_ = 0;
  int rounds_to_try_ = 0;
};

}  // namespace specdec::scheduler
