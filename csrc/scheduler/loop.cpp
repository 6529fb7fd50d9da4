// The loop: one turn of continuous batching, from top to bottom.
//
// Up to `rounds_in_flight` rounds are launched and not yet read: with 2, the device works on one while the loop reads
// what the one before it did and launches the one behind it. So a length is known one round late, a request that ends
// takes part in one round more, in which the device leaves it alone, and its pages come back one round late.
#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <thread>

#include "core/errors.h"
#include "core/slots.h"
#include "round/clock.h"
#include "scheduler/admission.h"
#include "scheduler/scheduler.h"

namespace specdec::scheduler {
namespace {

constexpr int kMostFailedLaunches = 8;  // in a row, before the device counts as gone
// A round is expected to take as long as the last one of its size, give or take 1/kTakesMore of that or kAtLeast ns,
// which covers the time to wake up. Nothing is expected of a round that takes longer than kLongest ns.
constexpr int64_t kTakesMore = 64, kAtLeast = 150'000, kLongest = 1'000'000'000;

std::vector<int32_t> slots_of(const std::vector<Request*>& requests) {
  std::vector<int32_t> slots;
  slots.reserve(requests.size());
  for (const Request* request : requests) slots.push_back(request->slot);
  return slots;
}

}  // namespace

// Makes one executor call on behalf of these holders of slots. If it throws, they end, and the exception is rethrown.
template <class Call>
void Scheduler::call_for(const std::vector<Request*>& requests, Call&& call) {
  try {
    call();
  } catch (...) {
    for (Request* request : requests) finish_held(*request, FinishReason::kError, 0, std::current_exception());
    told_ |= !requests.empty();
    throw;
  }
}

bool Scheduler::turn() {
  const Span span(recorder_, Work::kTurn);
  told_ = false;
  if (unsure_) recover();
  if (broken_) {
    give_up();
    stand_still();
    return false;
  }
  deliver();  // what an exception of the turn before left over
  stand_still();
  admit();
  if (cache_lost_) empty_cache();
  // While the device runs a prefill pass, the loop reads the rounds before it. Then the next round knows their results,
  // and its launch finds room in the device's queue, which the launches of a pass and of a round could fill together.
  if (prefill()) read_rounds();
  activate();
  if (launch_first_rounds()) {
    // The next round's texts are a token longer than when pages were counted. With no round to run beside another the
    // first tokens go out before it.
    if (std::ssize(in_flight_) >= config_.rounds_in_flight) read_oldest_round();
    make_room();
    if (cache_lost_) empty_cache();
    deliver();
  }
  const bool launched = launch_round();
  if (!in_flight_.empty() && (!launched || std::ssize(in_flight_) >= config_.rounds_in_flight)) read_oldest_round();
  deliver();
  return !settled() || !in_flight_.empty() || !given_back_.empty() || cache_lost_;
}

// Finds out, after a launch that threw, whether the device got the record and the round.
void Scheduler::recover() {
  if (failed_launches_ == kMostFailedLaunches) broken_ = failure_;
  if (broken_) return;
  Progress progress;
  try {
    progress = executor_.progress();
  } catch (...) {
    broken_ = std::current_exception();
    return;
  }
  if (progress.num_applied > num_sent_) given_back_.clear();
  num_sent_ = progress.num_applied;
  num_launched_ = progress.num_published;
  unsure_ = false;
  read_rounds();  // before rounds that nobody reads wrap around the ring
}

// Ends every request, with the reason, when the device is gone. Nothing is left to give back then.
void Scheduler::give_up() {
  read_mail();
  while (!slots_.empty()) finish_held(slots_.last(), FinishReason::kError, 0, broken_);
  for (const auto& request : waiting_) finish(*request, FinishReason::kError, 0, broken_);
  waiting_.clear();
  in_flight_.clear();
  leaving_.clear();
  given_back_.clear();
  forget_pages();
  emit();
}

// Decides which requests join and which leave.
void Scheduler::admit() {
  const Span span(recorder_, Work::kAdmit);
  read_mail();
  make_room();
  deliver();
  give_slots();
}

// New requests join the queue; cancelled ones end, and those whose time is over, wherever they are.
void Scheduler::read_mail() {
  std::deque<std::unique_ptr<Request>> submitted;
  std::unordered_set<int64_t> cancelled;
  bool clears;
  {
    const std::lock_guard lock(mutex_);
    submitted.swap(submitted_);
    cancelled.swap(cancelled_);
    clears = clearing_;
  }
  for (auto& request : submitted) enqueue(std::move(request));
  if (clears) {
    empty_cache();
    const std::lock_guard lock(mutex_);
    clearing_ = false;
    changed_.notify_all();
  }
  end_early(cancelled);
}

void Scheduler::end_early(const std::unordered_set<int64_t>& cancelled) {
  const int64_t now = next_deadline_ == kNoDeadline ? 0 : round::nanoseconds();
  if (cancelled.empty() && now < next_deadline_) return;
  next_deadline_ = kNoDeadline;
  const auto reason_of = [&](const Request& request) {
    if (cancelled.contains(request.id)) return FinishReason::kCancelled;
    if (request.deadline <= now) return FinishReason::kTimeout;
    next_deadline_ = std::min(next_deadline_, request.deadline);
    return FinishReason::kRunning;
  };
  std::vector<std::pair<Request*, FinishReason>> running;
  for (const auto& holder : slots_.holders())
    if (const auto reason = reason_of(*holder); reason != FinishReason::kRunning)
      running.emplace_back(holder.get(), reason);
  for (const auto& [request, reason] : running) finish_held(*request, reason);

  std::erase_if(waiting_, [&](const auto& request) {
    const auto reason = reason_of(*request);
    if (reason != FinishReason::kRunning) finish(*request, reason);
    return reason != FinishReason::kRunning;
  });
}

// Every slot must be sure of its pages in the next round. What the prefix cache can let go of is theirs. Until that
// suffices the rounds in flight are read, which shows how much they really took; then the last in rank goes back to the
// queue. The first is never alone in want: the pool holds one sequence of any length.
void Scheduler::make_room() {
  while (!round_fits(config_, slots_.holders(), cache_.num_locked())) {
    if (in_flight_.empty())
      retract_last();
    else
      read_oldest_round();
  }
  make_pages(pages_needed(config_, slots_.holders(), 0));
}

// By rank, and so first come, first served among those of one priority: whoever does not fit holds up those behind. A
// request that make_room has just retracted does not fit again yet, since admission asks for more than a round.
void Scheduler::give_slots() {
  while (!waiting_.empty() && !slots_.full() && !cache_lost_) {
    Request& next = *waiting_.front();
    share_prefix(next);
    if (awaits_prefix(next) || !request_fits(config_, slots_.holders(), cache_.num_locked(), next)) {
      leave_prefix(next);
      return;
    }
    make_pages(pages_for(config_, next.seq_len()) - next.num_shared + pages_needed(config_, slots_.holders(), 1));
    if (cache_lost_) return;
    if (!given_back_.empty()) send({});  // slots and pages are given back before they are given away
    Request& request = slots_.hold(std::move(waiting_.front()));
    request.text.reserve(std::min(request.text.size() + request.remaining, static_cast<size_t>(config_.max_len)));
    waiting_.pop_front();
    request.told = std::ssize(request.text);
    begin(request);
  }
}

// The request has a slot, and shares what the cache has of its text.
void Scheduler::begin(Request& request) {
  const int64_t shared = request.num_shared * config_.page_size;
  request.prefilled = request.written ? std::ssize(request.text) : shared;
  if (request.last_round == 0) request.counts.cached = shared;
  num_prefix_hits_ += shared > 0;
  num_cached_tokens_ += shared;
  publish();
  other_work_ = true;
  call_for({&request}, [&] {
    const Span span(recorder_, Work::kPrefill);
    executor_.begin(request.slot,
                    {request.id, request.text, request.ngram_group, request.extra.get(), shared_entries(request)});
  });
}

// Makes one prefill call with chunks of prompts by rank, as many as its rows suffice for. A decoding request waits
// for no more than this call between its rounds. Returns false where there are no prompts to prefill.
bool Scheduler::prefill() {
  std::vector<Request*> requests;
  std::vector<Chunk> chunks;
  int64_t room = config_.prefill_chunk;
  for (const auto& holder : slots_.holders()) {
    const int64_t count = std::min(room, holder->rows_to_prefill());
    if (count == 0 || std::ssize(chunks) == config_.prefill_requests) continue;
    const int64_t start = holder->prefilled;
    requests.push_back(holder.get());
    const Tokens text = holder->text;
    chunks.push_back(
        {holder->slot, start, text.subspan(start, count), text[std::min(start + count, holder->seq_len())]});
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

// Lets all requests that are prefilled take part in rounds from now on. One command record tells the device of them.
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
      // It may have been so since a turn that an exception ended.
      if (holder->state != RequestState::kStarting || std::ssize(slots) == config_.prefill_requests) continue;
      requests.push_back(holder.get());
      slots.push_back(holder->slot);
    }
    if (slots.empty()) return;
    call_for(requests, [&] {
      const Span span(recorder_, Work::kPrefill);
      executor_.activate(slots);
    });
    for (Request* request : requests)
      request->state = request->written ? RequestState::kRunning : RequestState::kBeginning;
  }
}

// Launches the first rounds of all requests that have been prefilled here, each of as many as a round has rows. Returns
// false where there are none.
bool Scheduler::launch_first_rounds() {
  const auto begins = [](const auto& holder) { return holder->state == RequestState::kBeginning; };
  if (std::ranges::none_of(slots_.holders(), begins)) return false;
  while (std::ranges::any_of(slots_.holders(), begins)) {
    if (std::ssize(in_flight_) >= config_.rounds_in_flight) read_oldest_round();
    const Span span(recorder_, Work::kPlan);
    std::vector<Request*> requests;
    for (const auto& holder : slots_.holders())
      if (begins(holder) && std::ssize(requests) < config_.max_batch()) requests.push_back(holder.get());
    const Round round{.size = size_for(requests), .is_first = true};
    launch(round, requests, kFirstRound, max_kv_len(config_, requests));
    other_work_ = true;  // to the round behind it
  }
  return true;
}

// Launches a round of all running requests, or of those that have waited longest where a round has fewer rows. Returns
// false where there is nothing to launch.
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

  const size_t size = size_for(requests);
  int64_t kv_rows = 0;
  int32_t behind = 0;
  bool wants_drafts = false;
  for (const Request* request : requests) {
    kv_rows += request->seq_len();
    behind = std::max(behind, request->behind);
    wants_drafts |= request->wants_drafts();
  }
  const int64_t batch = config_.batch_sizes[size];
  const std::vector<int64_t>& rows = config_.rows[size];
  const bool chooses = wants_drafts || !config_.plain_rounds;
  const size_t level =
      chooses ? budget_.next_level(size, static_cast<double>(requests.size()), static_cast<double>(kv_rows), behind)
              : 0;
  const int64_t num_rows = chooses ? rows[level] : batch;
  const int64_t most_rows = max_kv_len(config_, requests);
  const bool rests = config_.max_idle_rounds > 0 && num_rows == batch;
  if (behind > 0 && (!rests || behind >= config_.max_idle_rounds)) {
    call_for(requests, [&] { send({.slots = slots_of(requests)}, batch, kCatchUp, most_rows); });
    for (Request* request : requests) request->behind = 0;
  }
  size_t shown = level;
  while (shown > 0 && rows[shown] * last_batch_ > last_rows_ * batch) --shown;
  size_t scored = shown;
  if (shown == level && !config_.drafted.empty())
    while (scored + 1 < rows.size() && rows[scored + 1] <= config_.drafted[size][level] * batch) ++scored;
  const Round round{.size = size,
                    .level = level,
                    .shown = shown,
                    .scored = scored,
                    .kind = chooses ? level + took_[size].size() - rows.size() : 0,
                    .kv_rows = kv_rows,
                    .follows = !in_flight_.empty() && !other_work_};
  launch(round, requests, num_rows, most_rows);
  if (rests)
    for (Request* request : still_held(in_flight_.back())) request->behind += request->wants_drafts();
  other_work_ = false;
  last_batch_ = batch;
  last_rows_ = num_rows;
  return true;
}

// The smallest batch size of a round of these requests.
size_t Scheduler::size_for(const std::vector<Request*>& requests) const {
  return std::ranges::lower_bound(config_.batch_sizes, std::ssize(requests)) - config_.batch_sizes.begin();
}

// Launches a round of these requests, which run from then on.
void Scheduler::launch(Round round, std::vector<Request*> requests, int64_t rows, int64_t max_kv_len) {
  round.number = num_launched_;
  ++round_number_;
  round.rows.reserve(requests.size());
  for (Request* request : requests) {
    request->last_round = round_number_;
    round.rows.push_back({request->slot, request->id});
  }
  const bool constrained = std::ranges::any_of(requests, &Request::constrained);
  const int64_t batch = config_.batch_sizes[round.size];
  call_for(requests, [&] { send({.slots = slots_of(requests)}, batch, rows, max_kv_len, constrained); });
  if (constrained) {
    constrain(round, rows, max_kv_len);
    requests = still_held(round);
  }
  for (Request* request : requests) {
    request->state = RequestState::kRunning;
    ++request->in_flight;
  }
  in_flight_.push_back(std::move(round));
}

// Lets the executor rule on the next tokens of a round that has been launched as far as the target's logits: by all
// that came before, so rounds in flight are read first. What it needs time for, the target's pass over this round
// covers.
void Scheduler::constrain(const Round& round, int64_t rows, int64_t max_kv_len) {
  unsure_ = true;
  read_rounds();
  const std::vector<Request*> requests = still_held(round);
  std::vector<Constrained> constrained;
  for (size_t b = 0; b < round.rows.size(); ++b) {
    Request* request = slots_.at(round.rows[b].slot);
    if (request == nullptr || request->id != round.rows[b].request_id || !request->constrained) continue;
    constrained.push_back({static_cast<int64_t>(b), request->slot, Tokens(request->text).subspan(request->told)});
    request->told = std::ssize(request->text);
  }
  call_for(requests, [&] {
    const Span span(recorder_, Work::kLaunch);
    executor_.constrain(num_sent_, constrained, config_.batch_sizes[round.size], rows, max_kv_len);
  });
  unsure_ = false;
}

// Writes one command record, and launches a round behind it, of a constrained one the first step; or with kCatchUp a
// draft that catches up, or with no batch nothing.
void Scheduler::send(const Commands& commands, int64_t batch, int64_t rows, int64_t max_kv_len, bool constrained) {
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
    try {
      if (constrained)
        executor_.forward(batch, rows, max_kv_len);
      else
        executor_.launch(batch, rows, max_kv_len);
    } catch (...) {
      ++failed_launches_;
      failure_ = std::current_exception();
      throw;
    }
    unsure_ = false;
    failed_launches_ = 0;
    failure_ = nullptr;
  }
  given_back_.clear();
  ++num_sent_;
  if (rows != kCatchUp)
    ++num_launched_;
  else
    other_work_ = true;
}

void Scheduler::read_rounds() {
  while (!in_flight_.empty()) read_oldest_round();
}

void Scheduler::read_oldest_round() {
  // The round leaves the queue first, whatever happens then: results that cannot be read are dropped.
  const Round round = std::move(in_flight_.front());
  in_flight_.pop_front();
  const std::vector<Request*> requests = still_held(round);
  call_for(requests, [&] { await(round); });

  const Span span(recorder_, Work::kRead);
  const int64_t started_at = results_.started_at(round.number), ended_at = results_.ended_at(round.number);
  if (round.is_first) {
    recorder_.add_first_round(started_at, ended_at, std::ssize(round.rows));
  } else {
    took_[round.size][round.kind] = ended_at - started_at;
    recorder_.add_round(started_at, ended_at, std::ssize(round.rows), round.size, round.kind, round.follows);
    budget_.update_cost(round.size, round.level, static_cast<double>(round.rows.size()),
                        static_cast<double>(round.kv_rows), 1e-3 * static_cast<double>(ended_at - started_at));
    update_budget(round);
  }
  bool progress = requests.size() < round.rows.size();  // the pages of those who have ended come back
  size_t next = 0;
  for (size_t b = 0; b < round.rows.size() && next < requests.size(); ++b) {
    Request& request = *requests[next];
    if (request.id != round.rows[b].request_id) continue;  // it has ended since
    ++next;
    --request.in_flight;
    progress |= read_row(results_.row(round.number, static_cast<int64_t>(b)), request, round.is_first);
  }
  publish();
  if (round.is_first) return;  // whoever stalled there begins with another round

  // Every slot stalled, although its pages were counted: somebody else holds some. Once the rounds in flight show the
  // same the last ends, and gives the others its pages; retracting it would only admit it again.
  stuck_ = !progress;
  if (stuck_ && in_flight_.empty()) {
    finish_held(**std::ranges::max_element(requests, {}, &Request::rank), FinishReason::kError, kStalled);
    stuck_ = false;
  }
}

// Hands on what a round shows of its level and those below, and what its drafts promise of those above. Of levels with
// more rows a request than the round before had, nothing: where few nodes ended, a larger tree often begins amid a
// piece that it would have taken whole, and looks worse than it is.
void Scheduler::update_budget(const Round& round) {
  LevelResult shown = results_.levels(round.number);
  if (shown.requests <= 0 || shown.predicted.empty()) return;
  shown.predicted.resize(round.scored + 1);
  shown.observed.resize(round.shown + 1);
  budget_.update_gain(round.size, static_cast<double>(shown.requests), shown.predicted, shown.observed);
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

// Takes over what the round did for one request. Returns false when it stalled; then its state is as before the round.
bool Scheduler::read_row(const RowResult& result, Request& request, bool is_first) {
  const int64_t count = result.num_valid;
  const auto reason = static_cast<FinishReason>(result.finish_reason);
  const bool goes_on = reason == FinishReason::kRunning;
  int32_t status = result.status & ~kStalled;

  // The device has to keep these limits. Results that break them are of as little use as those of a broken slot.
  const int64_t most = is_first ? 1 : config_.accept_width;
  const int64_t room = std::min({most, request.remaining, config_.max_len - std::ssize(request.text)});
  const bool in_range =
      count >= 0 && count <= room && reason >= FinishReason::kRunning && reason <= FinishReason::kContext;
  // The loop covers the whole width: the processor cannot guess the number of tokens, and a branch that it mispredicts
  // in every row costs more than the copies it saves.
  int32_t signs = 0;
  for (int64_t j = 0; j < config_.accept_width; ++j) signs |= j < count ? result.tokens[j] : 0;
  if (!in_range || signs < 0) status |= kBadLength;
  if (status != 0) {
    finish_held(request, FinishReason::kError, status);
    return true;
  }
  if (count == 0 && goes_on) return false;

  const bool was_sound = request.sound > 0;
  request.sound = sound_rows(request);
  if (count > 0) request.accept(result.tokens, count);
  if (count > 0 && !is_first) request.count_round(count, result.num_nodes);
  if (request.num_logprobs >= 0) result.add_scores(count, request.num_logprobs, *request.scores);
  if (!goes_on) {
    finish_held(request, reason);  // its last tokens have no rows of the draft
    return true;
  }
  request.sound = sound_rows(request);
  if (!was_sound) cache_pages(request);
  if (request.streams) note_tokens(request, reason);
  return true;
}

// Waits for a round. Where the loop waited for the round before it, too, it knows when this one will end: the thread
// sleeps in one go until shortly before, which takes less of a core than many naps do, and polls from then on.
void Scheduler::await(const Round& round) {
  const auto done = [&] { return results_.is_published(round.number); };
  const int64_t began = std::exchange(began_, 0), took = took_[round.size][round.kind];
  if (done()) return;
  if (began > 0 && round.follows && took > 0 && took < kLongest) {
    const Span span(recorder_, Work::kWait);
    const int64_t end = began + took, margin = kAtLeast + took / kTakesMore, left = end - margin - round::nanoseconds();
    if (left > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left));
    while (!done() && round::nanoseconds() < end + margin) continue;
  }
  wait_until(done);
  began_ = round::nanoseconds();  // as what follows it did
}

// Waits for the device. It keeps the core at first, since the wait may be a matter of microseconds.
void Scheduler::wait_until(const std::function<bool()>& done) {
  if (done()) return;
  const Span span(recorder_, Work::kWait);
  using Clock = std::chrono::steady_clock;
  for (const auto end = Clock::now() + std::chrono::microseconds(30); Clock::now() < end;)
    if (done()) return;
  for (int naps = 1; !done(); ++naps) {
    // The device is asked before the last look at the ring, because a device at rest publishes no more.
    if (naps % 8 == 0 && !executor_.busy() && !done()) {
      unsure_ = true;
      throw std::runtime_error("step: the device is at rest and a record is missing, expected launch to publish it");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  }
}

// --- running it

bool Scheduler::step() {
  const LoopGuard guard(*this);
  return turn();
}

void Scheduler::run() {
  const LoopGuard guard(*this);
  bool again = true;
  while (wait_for_work(again)) {
    again = true;
    try {
      again = turn();
    } catch (...) {
      if (!told_) throw;
    }
  }
  outbox_.close();
  const std::lock_guard lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

// Waits until there is something to do; `again` says that the last turn has left something. Returns false when there
// is nothing to do and never will be.
bool Scheduler::wait_for_work(bool again) {
  std::unique_lock lock(mutex_);
  if (!again) {
    at_rest_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !alive_.empty() || clearing_ || pausing_ || stopping_; });
  }
  at_rest_ = !again && alive_.empty() && !clearing_ && !pausing_;
  return !at_rest_;
}

void Scheduler::settle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return at_rest_ || !alive_.empty(); });
}

}  // namespace specdec::scheduler
