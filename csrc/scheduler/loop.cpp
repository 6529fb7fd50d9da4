// The loop: one turn of continuous batching, from top to bottom.
//
// Up to `rounds_in_flight` rounds are launched and not yet read: with 2, the device works on one while the loop reads
// what the one before it did and launches the one behind it. So a length is known one round late, a request that ends
// takes part in one round more, in which the device leaves it alone, and its pages come back one round late.
#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <thread>

#include "core/slots.h"
#include "round/clock.h"
#include "scheduler/admission.h"
#include "scheduler/scheduler.h"

namespace specdec::scheduler {
namespace {

constexpr int kTimedRounds = 3;
// A round is expected to take what the last one of its kind took, give or take this share and this time (for what
// waking up takes, too), in ns; beyond the last number nothing is expected.
constexpr int64_t kTakesMore = 64, kAtLeast = 150'000, kLongest = 1'000'000'000;

}  // namespace

// One executor call on behalf of these holders of slots: if it throws, they end, and the exception goes on its way.
template <class Call>
void Scheduler::call_for(const std::vector<Request*>& requests, Call&& call) {
  try {
    call();
  } catch (...) {
    for (Request* request : requests) finish_held(*request, FinishReason::kError);
    throw;
  }
}

bool Scheduler::turn() {
  const Span span(recorder_, Work::kTurn);
  if (unsure_) recover();
  deliver();  // what an exception of the turn before left over
  admit();
  // While the device is at a pass, what it did before is read: then the next round knows of it, and its launch finds
  // room in the device's queue, which hundreds of launches of a pass and those of a round before it could fill.
  if (prefill()) read_rounds();
  activate();
  const bool launched = launch_round();
  if (!in_flight_.empty() && (!launched || std::ssize(in_flight_) >= config_.rounds_in_flight)) read_oldest_round();
  deliver();
  return !settled() || !in_flight_.empty() || !given_back_.empty();
}

// A launch threw. What went wrong may have come before or after the device got the record and the round.
void Scheduler::recover() {
  const Progress progress = executor_.progress();
  if (progress.num_applied > num_sent_) given_back_.clear();
  num_sent_ = progress.num_applied;
  num_launched_ = progress.num_published;
  unsure_ = false;
  read_rounds();  // before rounds that nobody reads wrap around the ring
}

// Who joins, and who leaves.
void Scheduler::admit() {
  const Span span(recorder_, Work::kAdmit);
  read_mail();
  make_room();
  deliver();
  give_slots();
}

// New requests join the queue; cancelled ones end, wherever they are.
void Scheduler::read_mail() {
  std::unordered_set<int64_t> cancelled;
  {
    const std::lock_guard lock(mutex_);
    std::ranges::move(submitted_, std::back_inserter(waiting_));
    submitted_.clear();
    cancelled.swap(cancelled_);
  }
  if (cancelled.empty()) return;

  std::vector<Request*> running;
  for (const auto& holder : slots_.holders())
    if (cancelled.contains(holder->id)) running.push_back(holder.get());
  for (Request* request : running) finish_held(*request, FinishReason::kCancelled);

  std::erase_if(waiting_, [&](const auto& request) {
    if (!cancelled.contains(request->id)) return false;
    finish(*request, FinishReason::kCancelled);
    return true;
  });
}

// Every slot must be sure of its pages in the next round. Until then the rounds in flight are read, which shows how
// much they really took; then the newest request goes back to the queue. The oldest is never alone in want: the pool
// holds one sequence of any length.
void Scheduler::make_room() {
  while (!round_fits(config_, slots_.holders())) {
    if (in_flight_.empty())
      retract_newest();
    else
      read_oldest_round();
  }
}

// First come, first served: whoever does not fit holds up those behind. A request that make_room has just retracted
// does not fit again yet, since admission asks for more than a round.
void Scheduler::give_slots() {
  while (!waiting_.empty() && !slots_.full() && request_fits(config_, slots_.holders(), *waiting_.front())) {
    if (!given_back_.empty()) send({});  // slots and pages are given back before they are given away
    Request& request = slots_.hold(std::move(waiting_.front()));
    request.text.reserve(std::min(request.text.size() + request.remaining, static_cast<size_t>(config_.max_len)));
    waiting_.pop_front();
    publish();
    other_work_ = true;
    call_for({&request}, [&] {
      const Span span(recorder_, Work::kPrefill);
      executor_.begin(request.slot, request.id, request.text);
    });
  }
}

// One call for the oldest prefills, with a chunk of as many as its rows are enough for: a decoding request waits for no
// more than that between its rounds. False where there are none.
bool Scheduler::prefill() {
  std::vector<Request*> requests;
  std::vector<Chunk> chunks;
  int64_t room = config_.prefill_chunk;
  for (const auto& holder : slots_.holders()) {
    const int64_t count = std::min(room, holder->rows_to_prefill());
    if (count == 0 || std::ssize(chunks) == config_.prefill_requests) continue;
    const int64_t start = holder->prefilled;
    requests.push_back(holder.get());
    chunks.push_back({holder->slot, start, Tokens(holder->text).subspan(start, count + 1)});
    room -= count;
  }
  if (chunks.empty()) return false;

  other_work_ = true;
  call_for(requests, [&] {
    const Span span(recorder_, Work::kPrefill);
    executor_.prefill(chunks);
  });
  for (size_t i = 0; i < chunks.size(); ++i) requests[i]->prefilled += chunks[i].num_rows();
  return true;
}

// Whoever is prefilled takes part in rounds from now on: one record tells the device of all, then they share calls.
void Scheduler::activate() {
  std::vector<Request*> prefilled;
  for (const auto& holder : slots_.holders())
    if (holder->state == RequestState::kPrefilling && holder->rows_to_prefill() == 0) prefilled.push_back(holder.get());
  if (!prefilled.empty()) call_for(prefilled, [&] { send({.activated = prefilled}); });
  for (Request* request : prefilled) request->state = RequestState::kStarting;

  while (true) {
    std::vector<Request*> requests;
    std::vector<int32_t> slots;
    for (const auto& holder : slots_.holders()) {
      // Perhaps since a turn that an exception ended.
      if (holder->state != RequestState::kStarting || std::ssize(slots) == config_.prefill_requests) continue;
      requests.push_back(holder.get());
      slots.push_back(holder->slot);
    }
    if (slots.empty()) return;
    call_for(requests, [&] {
      const Span span(recorder_, Work::kPrefill);
      executor_.activate(slots);
    });
    for (Request* request : requests) request->state = RequestState::kRunning;
  }
}

// All running requests, or those who have waited longest where a round has fewer rows. False where there is nothing to
// launch.
bool Scheduler::launch_round() {
  if (stuck_ && !in_flight_.empty()) return false;
  const Span span(recorder_, Work::kPlan);
  std::vector<Request*> requests;
  requests.reserve(slots_.size());
  for (const auto& holder : slots_.holders())
    if (holder->wants_another_round(config_.max_len)) requests.push_back(holder.get());
  if (requests.empty()) return false;
  if (std::ssize(requests) > config_.max_batch()) {
    std::ranges::stable_sort(requests, {}, &Request::last_round);
    requests.resize(config_.max_batch());
  }

  ++turn_number_;
  const size_t size = std::ranges::lower_bound(config_.batch_sizes, std::ssize(requests)) - config_.batch_sizes.begin();
  const size_t rung = ladder_.next(size);
  Round round{.number = num_launched_,
              .size = size,
              .rung = rung,
              .shown = std::min(rung, last_rung_),
              .rows = {},
              .follows = !in_flight_.empty() && !other_work_};
  std::vector<int32_t> slots;
  slots.reserve(requests.size());
  round.rows.reserve(requests.size());
  for (Request* request : requests) {
    request->last_round = turn_number_;
    slots.push_back(request->slot);
    round.rows.push_back({request->slot, request->id});
  }
  call_for(requests, [&] { send({.slots = slots}, config_.batch_sizes[size], config_.nodes[round.rung]); });
  for (Request* request : requests) ++request->in_flight;
  in_flight_.push_back(std::move(round));
  other_work_ = false;
  last_rung_ = rung;
  return true;
}

// One command record, and a round behind it unless batch is 0.
void Scheduler::send(const Commands& commands, int64_t batch, int64_t num_nodes) {
  wait_until([&] { return commands_.is_free(num_sent_); });
  Commands all = commands;
  all.given_back = given_back_;
  {
    const Span span(recorder_, Work::kCommands);
    commands_.write(num_sent_, all);
  }
  {
    const Span span(recorder_, Work::kLaunch);
    unsure_ = true;
    executor_.launch(batch, num_nodes);
    unsure_ = false;
  }
  given_back_.clear();
  ++num_sent_;
  if (batch > 0)
    ++num_launched_;
  else
    other_work_ = true;
}

void Scheduler::read_rounds() {
  while (!in_flight_.empty()) read_oldest_round();
}

void Scheduler::read_oldest_round() {
  // Nobody else takes part in its end, whatever happens: what cannot be read is dropped.
  const Round round = std::move(in_flight_.front());
  in_flight_.pop_front();
  const std::vector<Request*> requests = still_held(round);
  call_for(requests, [&] { await(round); });

  const Span span(recorder_, Work::kRead);
  const int64_t started_at = results_.started_at(round.number), ended_at = results_.ended_at(round.number);
  took_[round.size][round.rung] = ended_at - started_at;
  recorder_.add_round(started_at, ended_at, std::ssize(round.rows), round.rung, round.follows);
  ladder_.note_time(round.size, round.rung, 1e-3 * static_cast<double>(ended_at - started_at));
  bool progress = requests.size() < round.rows.size();  // the pages of those who have ended come back
  size_t next = 0;
  for (size_t b = 0; b < round.rows.size() && next < requests.size(); ++b) {
    Request& request = *requests[next];
    if (request.id != round.rows[b].request_id) continue;  // it has ended since
    ++next;
    --request.in_flight;
    progress |= read_row(results_.row(round.number, static_cast<int64_t>(b)), round.shown, request);
  }
  publish();

  // Every slot stalled, although its pages were counted: somebody else holds some. Once the rounds in flight show the
  // same the newest ends, and gives the others its pages; retracting it would only admit it again.
  stuck_ = !progress;
  if (stuck_ && in_flight_.empty()) {
    finish_held(**std::ranges::max_element(requests, {}, &Request::id), FinishReason::kError, kStalled);
    stuck_ = false;
  }
}

// The requests of a round that have not ended since, in the order of its rows.
std::vector<Request*> Scheduler::still_held(const Round& round) const {
  std::vector<Request*> requests;
  requests.reserve(round.rows.size());
  for (const auto& row : round.rows) {
    Request* request = slots_.at(row.slot);
    if (request != nullptr && request->id == row.request_id) requests.push_back(request);
  }
  return requests;
}

// What the round did for one request. False when it stalled; then its state is as before the round.
bool Scheduler::read_row(const RowResult& result, size_t shown_rung, Request& request) {
  const int64_t count = result.out_len;
  const auto reason = static_cast<FinishReason>(result.finish_reason);
  const bool goes_on = reason == FinishReason::kNone;
  int32_t status = result.status & ~kStalled;

  // The limits are the device's to keep. Results that break them are as little use as a broken slot.
  const int64_t room = std::min({config_.accept_width, request.remaining, config_.max_len - std::ssize(request.text)});
  const bool in_range =
      count >= 0 && count <= room && reason >= FinishReason::kNone && reason <= FinishReason::kContext;
  // Over the whole width: how many tokens there are cannot be guessed, and a loop that ends elsewhere in every row
  // costs more than what it does.
  int32_t signs = 0;
  for (int64_t j = 0; j < config_.accept_width; ++j) signs |= j < count ? result.tokens[j] : 0;
  if (!in_range || signs < 0) status |= kBadLength;
  if (status != 0) {
    finish_held(request, FinishReason::kError, status);
    return true;
  }
  if (count == 0 && goes_on) return false;

  if (count > 0) request.accept(result.tokens, count, result.num_nodes);
  if (request.num_logprobs >= 0) result.add_scores(count, request.num_logprobs, *request.scores);
  if (!goes_on) {
    finish_held(request, reason);
    return true;
  }
  ladder_.observe(shown_rung, {result.path + 1, result.path + count});  // of a last round some may have been cut off
  if (request.streams) note_tokens(request, reason, 0);
  return true;
}

// Waits for a round. Where the one before it was waited for, too, it is known when it will end: until shortly before,
// the thread sleeps in one go, which takes less of a core than many naps; what is left it polls.
void Scheduler::await(const Round& round) {
  const auto done = [&] { return results_.is_published(round.number); };
  const int64_t began = std::exchange(began_, 0), took = took_[round.size][round.rung];
  if (done()) return;
  if (began > 0 && round.follows && took > 0 && took < kLongest) {
    const Span span(recorder_, Work::kWait);
    const int64_t end = began + took, margin = kAtLeast + took / kTakesMore, left = end - margin - nanoseconds();
    if (left > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left));
    while (!done() && nanoseconds() < end + margin) continue;
  }
  wait_until(done);
  began_ = nanoseconds();  // as what follows it did
}

// Waits for the device: at first without letting go of the core, since it may be a matter of microseconds.
void Scheduler::wait_until(const std::function<bool()>& done) {
  if (done()) return;
  const Span span(recorder_, Work::kWait);
  using Clock = std::chrono::steady_clock;
  for (const auto end = Clock::now() + std::chrono::microseconds(30); Clock::now() < end;)
    if (done()) return;
  for (int naps = 1; !done(); ++naps) {
    // Asked before the last look: what is at rest publishes no more.
    if (naps % 8 == 0 && !executor_.busy() && !done()) {
      unsure_ = true;
      throw std::runtime_error("step: the device is at rest and a record is missing, expected launch to publish it");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  }
}

// --- running it

class Scheduler::LoopGuard {
 public:
  explicit LoopGuard(Scheduler& scheduler) : looping_(scheduler.looping_) {
    if (looping_.exchange(true)) throw std::runtime_error("step: the loop is running already, expected one at a time");
  }
  ~LoopGuard() { looping_ = false; }
  LoopGuard(const LoopGuard&) = delete;
  LoopGuard& operator=(const LoopGuard&) = delete;

 private:
  std::atomic<bool>& looping_;
};

bool Scheduler::step() {
  const LoopGuard guard(*this);
  return turn();
}

void Scheduler::run_until_idle(const std::function<void()>& between_turns) {
  const LoopGuard guard(*this);
  while (turn()) between_turns();
}

// --- what rounds cost

void Scheduler::measure_rounds() {
  const LoopGuard guard(*this);
  if (num_held_ > 0 || !in_flight_.empty())
    throw std::runtime_error("measure_rounds: requests hold slots, expected none");
  std::vector<std::vector<double>> us;
  for (const int64_t batch : config_.batch_sizes) {
    us.emplace_back();
    for (const int64_t nodes : config_.nodes) us.back().push_back(1e-3 * static_cast<double>(time_round(batch, nodes)));
  }
  ladder_.set_costs({config_.batch_sizes, config_.nodes, std::move(us)});
  recorder_.reset();
}

// Nanoseconds of the device's own clock, the least of some rounds.
int64_t Scheduler::time_round(int64_t batch, int64_t num_nodes) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kTimedRounds; ++i) {
    const int64_t number = num_launched_;
    send({}, batch, num_nodes);
    wait_until([&] { return results_.is_published(number); });
    least = std::min(least, results_.ended_at(number) - results_.started_at(number));
  }
  return std::max<int64_t>(least, 1);
}

}  // namespace specdec::scheduler
