// Measures what rounds cost before there are requests, by rounds of synthetic requests.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/errors.h"
#include "scheduler/admission.h"
#include "scheduler/scheduler.h"

namespace specdec::scheduler {
namespace {

// A size is timed until its two fastest rounds agree within kAgree (on a GPU the first two do; on a busy CPU, rounds
// that were delayed or found cold caches do not), but at most kTimedRounds times and for kTimedMost, and only once if
// that takes kTimedOnce.
constexpr double kAgree = 1.05;
constexpr int kTimedRounds = 6;
constexpr int64_t kTimedOnce = 10'000'000, kTimedMost = 40'000'000;  // ns
// A time that contradicts the next one is taken again, at most this often for a level: it is longer than that of more
// rows, or than kOfProportion times that of fewer rows in proportion.
constexpr int kTimedAgain = 4;
constexpr double kOfProportion = 1.5;
// The n-gram group and the first id of these requests, which no others have.
constexpr int32_t kGroup = std::numeric_limits<int32_t>::max();
constexpr int64_t kFirstId = int64_t{1} << 62;

}  // namespace

// Times rounds of synthetic requests that hold the first slots. Each begins with one token, another for each slot where
// the vocabulary has as many, since equal texts choose the same experts. It ends only at max_len. A slot that gets no
// pages takes no part, as in any round.
class Scheduler::RoundTimer {
 public:
  // Takes distinct ids from `next_id` on: to a draft, an id seen before is a retracted request that comes back.
  RoundTimer(Scheduler& scheduler, int64_t batch, int64_t& next_id)
      : scheduler_(scheduler), batch_(batch), next_id_(next_id) {
    for (int32_t slot = 0; slot < batch; ++slot) slots_.push_back(slot);
    begin();
  }

  // Gives the slots back.
  void end() {
    scheduler_.executor_.deactivate(slots_);
    scheduler_.given_back_ = slots_;
    scheduler_.send({});
  }

  // Returns the least duration of some rounds with this many rows, in nanoseconds of the device's clock.
  int64_t time_round(int64_t rows) {
    return least_of([&] {
      keep_short();
      if (draft_idled_ && rows > batch_) launch(kCatchUp);
      const int64_t number = launch(rows);
      const int64_t elsewhere = wait_for(number);
      const int64_t ns = std::max(results().ended_at(number) - results().started_at(number), elsewhere);
      return Timed{ns, ns};
    });
  }

  // Returns the least time between two rounds with a catch-up in between, in nanoseconds of the device's clock. The
  // device has all three launches before it is done with the first.
  int64_t time_catch_up() {
    return least_of([&] {
      keep_short();
      const int64_t first = launch(batch_);
      launch(kCatchUp);
      const int64_t second = launch(batch_);
      wait_for(second);
      return Timed{results().started_at(second) - results().ended_at(first),
                   results().ended_at(second) - results().started_at(first)};
    });
  }

 private:
  struct Timed {
    int64_t ns, whole;  // `whole` includes the launches around it
  };
  // Returns the least time; repeats until two times agree.
  static int64_t least_of(const std::function<Timed()>& time) {
    auto [least, spent] = time();
    int64_t second = spent < kTimedOnce ? std::numeric_limits<int64_t>::max() : least;
    for (int i = 1; i < kTimedRounds && spent < kTimedMost; ++i) {
      if (static_cast<double>(second) <= kAgree * static_cast<double>(least)) break;
      const auto [ns, whole] = time();
      second = std::clamp(ns, least, second);
      least = std::min(least, ns);
      spent += whole;
    }
    return std::max<int64_t>(least, 1);
  }

  void begin() {
    std::vector<Request> requests;
    const auto vocab_size = static_cast<int32_t>(scheduler_.config_.vocab_size);
    for (const int32_t slot : slots_)
      requests.push_back({.id = next_id_++,
                          .text = {slot % vocab_size},
                          .emitted = 1,
                          .remaining = scheduler_.config_.max_len,
                          .slot = slot,
                          .max_nodes = std::numeric_limits<int32_t>::max(),
                          .streams = false,
                          .ngram_group = kGroup});
    std::vector<Request*> activated;
    for (Request& request : requests) {
      activated.push_back(&request);
      scheduler_.executor_.begin(request.slot, {request.id, request.text, request.ngram_group, nullptr, {}});
    }
    std::vector<Chunk> chunks;
    for (const Request& request : requests) chunks.push_back({request.slot, 0, request.text, request.text.back()});
    const int64_t most = scheduler_.config_.prefill_requests, most_rows = scheduler_.config_.prefill_chunk;
    for_each_part(std::span<const Chunk>(chunks), std::min(most, most_rows),
                  [&](auto part) { scheduler_.executor_.prefill(part); });
    scheduler_.send({.activated = activated});
    for_each_part(std::span<const int32_t>(slots_), most, [&](auto part) { scheduler_.executor_.activate(part); });
    longest_ = 0;
    draft_idled_ = false;
  }

  // Calls with at most `most` elements at a time.
  template <class T, class Call>
  static void for_each_part(std::span<const T> all, int64_t most, Call&& call) {
    for (int64_t i = 0; i < std::ssize(all); i += most) call(all.subspan(i, std::min(most, std::ssize(all) - i)));
  }

  // Restarts the requests well before they reach max_len, where they would take no part in rounds.
  void keep_short() {
    if (longest_ + 2 * scheduler_.config_.accept_width <= scheduler_.config_.max_len / 2 || longest_ == 0) return;
    end();
    begin();
  }

  const ResultRing& results() const { return scheduler_.results_; }
  // Waits for a round on all ranks, and returns its longest duration on another one.
  int64_t wait_for(int64_t number) {
    scheduler_.wait_until([&] { return results().is_published(number); });
    return scheduler_.executor_.agree(number, batch_,
                                      [](int64_t row) { return "measured row " + std::to_string(row); });
  }

  // Launches a round and returns its number (none for a catch-up).
  int64_t launch(int64_t rows) {
    const Config& config = scheduler_.config_;
    const int64_t number = scheduler_.num_launched_;
    scheduler_.send({.slots = slots_}, batch_, rows, rows_for(config, longest_));
    if (rows != kCatchUp) longest_ += config.accept_width;
    draft_idled_ = config.max_idle_rounds > 0 && rows == batch_;
    return number;
  }

  Scheduler& scheduler_;
  const int64_t batch_;
  int64_t& next_id_;
  std::vector<int32_t> slots_;
  int64_t longest_ = 0;  // no text has more rows
  bool draft_idled_ = false;
};

void Scheduler::measure_rounds(const std::vector<int64_t>& batches) {
  const LoopGuard guard(*this);
  if (num_held_ > 0 || !in_flight_.empty())
    throw std::runtime_error("measure_rounds: requests hold slots, expected none");
  const std::vector<int64_t>& sizes = config_.batch_sizes;
  const bool rise = std::ranges::adjacent_find(batches, std::greater_equal<>()) == batches.end();
  if (!rise || !std::ranges::includes(sizes, batches) || batches.empty() || batches.front() != sizes.front() ||
      batches.back() != sizes.back())
    throw ValueError("measure_rounds: batches is " + text_of(batches) + ", expected increasing ones of " +
                     text_of(sizes) + ", the first and the last among them");
  std::vector<std::vector<double>> us(sizes.size());
  std::vector<double> catch_up(config_.max_idle_rounds > 0 ? sizes.size() : 0);
  int64_t next_id = kFirstId;
  size_t before = 0;  // the size that was timed last
  // Returns the us of a round with `each` rows per request, interpolated between timed levels.
  const auto us_at = [&](size_t size, double each) {
    const double rows = each * static_cast<double>(sizes[size]);
    size_t next = 0;
    while (next + 1 < us[size].size() && static_cast<double>(config_.rows[size][next]) < rows) ++next;
    if (next == 0) return us[size][0];
    const double low = static_cast<double>(config_.rows[size][next - 1]),
                 high = static_cast<double>(config_.rows[size][next]);
    return std::lerp(us[size][next - 1], us[size][next], (rows - low) / (high - low));
  };
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (!std::ranges::binary_search(batches, sizes[i])) continue;
    RoundTimer timer(*this, sizes[i], next_id);
    const auto time = [&](int64_t rows) { return 1e-3 * static_cast<double>(timer.time_round(rows)); };
    for (const int64_t rows : config_.rows[i]) us[i].push_back(time(rows));
    const auto is_doubtful = [&](size_t level) {
      if (level + 1 < us[i].size() && us[i][level] > us[i][level + 1]) return true;
      if (level == 0) return false;
      const double growth =
          static_cast<double>(config_.rows[i][level]) / static_cast<double>(config_.rows[i][level - 1]);
      return us[i][level] > kOfProportion * growth * us[i][level - 1];
    };
    for (int again = 0; again < kTimedAgain; ++again)
      for (size_t level = us[i].size(); level-- > 0;)
        if (is_doubtful(level)) us[i][level] = std::min(us[i][level], time(config_.rows[i][level]));
    if (config_.max_idle_rounds > 0) catch_up[i] = 1e-3 * static_cast<double>(timer.time_catch_up());
    timer.end();
    for (size_t j = before + 1; j < i; ++j) {
      const double share =
          static_cast<double>(sizes[j] - sizes[before]) / static_cast<double>(sizes[i] - sizes[before]);
      for (const int64_t rows : config_.rows[j]) {
        const double each = static_cast<double>(rows) / static_cast<double>(sizes[j]);
        us[j].push_back(std::lerp(us_at(before, each), us_at(i, each), share));
      }
      if (config_.max_idle_rounds > 0) catch_up[j] = std::lerp(catch_up[before], catch_up[i], share);
    }
    before = i;
  }
  budget_.set_costs({sizes, config_.rows, std::move(us), std::move(catch_up)});
  recorder_.reset();
}

void Scheduler::set_costs(RoundCosts costs) {
  const LoopGuard guard(*this);
  if (num_held_ > 0 || !in_flight_.empty()) throw std::runtime_error("set_costs: requests hold slots, expected none");
  if (costs.batches != config_.batch_sizes || costs.rows != config_.rows)
    throw ValueError("set_costs: costs is of other rounds, expected batches " + text_of(config_.batch_sizes) +
                     " with rows up to " + text_of(config_.rows.back()));
  if (costs.catch_up.empty() != (config_.max_idle_rounds == 0))
    throw ValueError(std::string("set_costs: costs is ") + (costs.catch_up.empty() ? "without" : "with") +
                     " catch_up, expected it if a draft can be idle (max_idle_rounds is " +
                     std::to_string(config_.max_idle_rounds) + ")");
  budget_.set_costs(std::move(costs));
}

}  // namespace specdec::scheduler
