// The loop: one turn of continuous batching, from top to bottom.
//
// Up to `rounds_in_flight` rounds are launched and not yet read: with 2, the device works on one while the loop reads
// the results of the one before and launches the next. So a length is known one round late; a request that ends takes
// part in one more round, in which the device skips it; and its pages come back one round late.
#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/errors.h"
#include "core/slots.h"
#include "round/clock.h"
#include "scheduler/admission.h"
#include "scheduler/scheduler.h"

namespace specdec::scheduler {
namespace {

constexpr int kMaxFailedLaunches = 8;  // in a row, before the device counts as gone
// A round is expected to take as long as the last one of its size and level, plus or minus 1/kTolerance of that plus
// kWakeUpNs. Rounds longer than kMaxExpectedNs have no expected duration.
constexpr int64_t kTolerance = 64, kWakeUpNs = 150'000, kMaxExpectedNs = 1'000'000'000;

std::vector<int32_t> slots_of(const std::vector<Request*>& requests) {
  std::vector<int32_t> slots;
  slots.reserve(requests.size());
  for (const Request* request : requests) slots.push_back(request->slot);
  return slots;
}

}  // namespace

// Makes one executor call for these requests, which hold slots. If it throws, they end, and the exception is rethrown.
template <class Call>
void Scheduler::call_for(const std::vector<Request*>& requests, Call&& call) {
  try {
    call();
  } catch (...) {
    for (Request* request : requests) finish_held(*request, FinishReason::kError, 0, std::current_exception());
    exception_delivered_ |= !requests.empty();
    throw;
  }
}

bool Scheduler::turn() {
  const Span span(recorder_, Work::kTurn);
  exception_delivered_ = false;
  if (!device_error_) try {
      executor_.expect_alive();
    } catch (...) {
      device_error_ = std::current_exception();
    }
  if (launch_unknown_ && !device_error_) recover();
  if (device_error_) {
    fail_all();
    pause_if_requested();
    return false;
  }
  flush();  // leftovers of a turn that an exception ended
  pause_if_requested();
  admit();
  if (prefix_.pages_unknown) empty_cache();
  // While the device runs a prefill pass, the loop reads the rounds before it. So the next round knows their results,
  // and its launch finds room in the device's queue, which the launches of a pass and of a round could fill together.
  if (prefill()) read_all_rounds();
  activate();
  if (launch_first_rounds()) {
    // The texts are a token longer than when pages were counted. If rounds do not overlap, the first tokens are
    // published before the next round.
    if (std::ssize(in_flight_) >= config_.rounds_in_flight) read_oldest_round();
    make_room();
    if (prefix_.pages_unknown) empty_cache();
    flush();
  }
  const bool launched = launch_round();
  if (!in_flight_.empty() && (!launched || std::ssize(in_flight_) >= config_.rounds_in_flight)) read_oldest_round();
  flush();
  return !all_ended() || !in_flight_.empty() || !given_back_.empty() || prefix_.pages_unknown;
}

// Finds out, after a launch that threw, whether the device got the record and the round.
void Scheduler::recover() {
  if (failed_launches_ == kMaxFailedLaunches) device_error_ = launch_error_;
  if (device_error_) return;
  Progress progress;
  try {
    progress = executor_.progress();
  } catch (...) {
    device_error_ = std::current_exception();
    return;
  }
  if (progress.num_applied > num_sent_) given_back_.clear();
  num_sent_ = progress.num_applied;
  num_launched_ = progress.num_published;
  launch_unknown_ = false;
  read_all_rounds();  // before rounds that nobody reads wrap around the ring
}

// Ends every request with the device's error. Nothing is left to give back then.
void Scheduler::fail_all() {
  receive_requests();
  while (!slots_.empty()) finish_held(slots_.last(), FinishReason::kError, 0, device_error_);
  for (const auto& request : waiting_) finish(*request, FinishReason::kError, 0, device_error_);
  waiting_.clear();
  in_flight_.clear();
  to_deactivate_.clear();
  given_back_.clear();
  forget_cached_pages();
  publish_updates();
}

// Decides which requests join and which leave.
void Scheduler::admit() {
  const Span span(recorder_, Work::kAdmit);
  receive_requests();
  make_room();
  flush();
  assign_slots();
}

// Queues new requests, and ends requests that were cancelled or whose time is up.
void Scheduler::receive_requests() {
  std::deque<std::unique_ptr<Request>> submitted;
  std::unordered_set<int64_t> cancelled;
  bool clears;
  {
    const std::lock_guard lock(mutex_);
    submitted.swap(submitted_);
    cancelled.swap(cancelled_);
    clears = prefix_.clear_requested;
  }
  for (auto& request : submitted) enqueue(std::move(request));
  if (clears) {
    empty_cache();
    const std::lock_guard lock(mutex_);
    prefix_.clear_requested = false;
    state_changed_.notify_all();
  }
  end_cancelled_and_expired(cancelled);
}

void Scheduler::end_cancelled_and_expired(const std::unordered_set<int64_t>& cancelled) {
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

// Makes sure that every slot gets its pages in the next round. Pages that the prefix cache can evict count as free. If
// there are too few, reads the rounds in flight, which shows how many pages they really used, and then retracts
// requests from the last in rank on. The first always fits: the pool holds one sequence of any length.
void Scheduler::make_room() {
  while (!round_fits(config_, slots_.holders(), prefix_.cache.num_locked())) {
    if (in_flight_.empty())
      retract_last();
    else
      read_oldest_round();
  }
  evict_pages_for(pages_needed(config_, slots_.holders(), 0));
}

// Gives slots to waiting requests by rank, i.e. first come, first served within a priority: a request that does not fit
// blocks those after it. A request that make_room has just retracted does not fit again yet, since admission requires
// room for more than a round.
void Scheduler::assign_slots() {
  while (!waiting_.empty() && !slots_.full() && !prefix_.pages_unknown) {
    Request& next = *waiting_.front();
    share_prefix(next);
    if (waits_for_prefix(next) || !request_fits(config_, slots_.holders(), prefix_.cache.num_locked(), next)) {
      release_prefix(next);
      return;
    }
    evict_pages_for(pages_for(config_, next.seq_len()) - next.num_shared + pages_needed(config_, slots_.holders(), 1));
    if (prefix_.pages_unknown) return;
    if (!given_back_.empty()) send({});  // slots and pages are given back before they are assigned again
    Request& request = slots_.hold(std::move(waiting_.front()));
    request.tail.reset();
    request.text.reserve(std::min(request.text.size() + request.remaining, static_cast<size_t>(config_.max_len)));
    waiting_.pop_front();
    request.num_known_tokens = std::ssize(request.text);
    begin(request);
  }
}

// Begins a request that has a slot and shares the cached pages of its text.
void Scheduler::begin(Request& request) {
  const int64_t shared = request.num_shared * config_.page_size;
  request.prefilled = request.migrated ? std::ssize(request.text) : shared;
  if (request.last_round == 0) request.counts.cached = shared;
  prefix_.num_hits += shared > 0;
  prefix_.num_tokens += shared;
  const int32_t snapshot = shared > 0 ? PrefixCache::snapshot(request.prefix) : -1;
  prefix_.num_restored_snapshots += snapshot >= 0;
  update_counters();
  other_work_since_round_ = true;
  call_for({&request}, [&] {
    const Span span(recorder_, Work::kPrefill);
    executor_.begin(request.slot, {request.id, request.text, request.ngram_group, request.extra.get(),
                                   shared_entries(request), snapshot});
  });
}

// Makes one prefill call with chunks of prompts, by rank, up to prefill_chunk rows. A decoding request waits for at
// most this call between its rounds. A chunk ends at the latest where a snapshot is to be saved. Returns false if there
// are no prompts to prefill.
bool Scheduler::prefill() {
  std::vector<Request*> requests;
  std::vector<Chunk> chunks;
  int64_t room = config_.prefill_chunk;
  for (const auto& holder : slots_.holders()) {
    const int64_t count = std::min(room, rows_to_snapshot(*holder));
    if (count == 0 || std::ssize(chunks) == config_.prefill_requests) continue;
    const int64_t start = holder->prefilled;
    requests.push_back(holder.get());
    const Tokens text = holder->text;
    chunks.push_back(
        {holder->slot, start, text.subspan(start, count), text[std::min(start + count, holder->seq_len())]});
    room -= count;
  }
  if (chunks.empty()) return false;

  other_work_since_round_ = true;
  call_for(requests, [&] {
    const Span span(recorder_, Work::kPrefill);
    executor_.prefill(chunks);
  });
  for (size_t i = 0; i < chunks.size(); ++i) requests[i]->prefilled += chunks[i].num_rows();
  if (config_.num_snapshots == 0) return true;
  const std::vector<Request*> due = take_due_snapshots(requests);
  if (due.empty()) return true;
  std::vector<int32_t> snapshots;
  for (const Request* request : due) snapshots.push_back(request->snapshots.back().id);
  call_for(due, [&] {
    const Span span(recorder_, Work::kPrefill);
    executor_.save_snapshots(slots_of(due), snapshots);
  });
  return true;
}

// Lets all prefilled requests take part in rounds from now on. One command record activates them on the device.
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
      // A request may be left in this state by a turn that an exception ended.
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
      request->state = request->migrated ? RequestState::kRunning : RequestState::kBeginning;
  }
}

// Launches the first rounds of all prefilled requests (not of migrated ones), a full batch at a time. Returns false if
// there are none.
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
    other_work_since_round_ = true;  // a first round counts as such for the next round
  }
  return true;
}

// Launches a round of all running requests, or, if these exceed the largest batch, of those that have waited longest.
// Returns false if there is nothing to launch.
bool Scheduler::launch_round() {
  if (no_progress_ && !in_flight_.empty()) return false;
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
  int32_t draft_lag = 0;
  bool wants_drafts = false;
  for (const Request* request : requests) {
    kv_rows += request->seq_len();
    draft_lag = std::max(draft_lag, request->draft_lag);
    wants_drafts |= request->wants_drafts();
  }
  const int64_t batch = config_.batch_sizes[size];
  const std::vector<int64_t>& levels = config_.rows[size];
  const bool chooses = wants_drafts || !config_.plain_rounds;
  const size_t level =
      chooses ? budget_.next_level(size, static_cast<double>(requests.size()), static_cast<double>(kv_rows), draft_lag)
              : 0;
  const int64_t num_rows = chooses ? levels[level] : batch;
  const int64_t kv_limit = max_kv_len(config_, requests);
  const bool draft_idles = config_.max_idle_rounds > 0 && num_rows == batch;
  if (draft_lag > 0 && (!draft_idles || draft_lag >= config_.max_idle_rounds)) {
    call_for(requests, [&] { send({.slots = slots_of(requests)}, batch, kCatchUp, kv_limit); });
    for (Request* request : requests) request->draft_lag = 0;
  }
  size_t observed = level;
  while (observed > 0 && levels[observed] * last_batch_ > last_rows_ * batch) --observed;
  size_t predicted = observed;
  if (observed == level && !config_.drafted.empty())
    while (predicted + 1 < levels.size() && levels[predicted + 1] <= config_.drafted[size][level] * batch) ++predicted;
  const Round round{.size = size,
                    .level = level,
                    .observed = observed,
                    .predicted = predicted,
                    .kind = chooses ? level + last_round_ns_[size].size() - levels.size() : 0,
                    .kv_rows = kv_rows,
                    .follows = !in_flight_.empty() && !other_work_since_round_};
  launch(round, requests, num_rows, kv_limit);
  if (draft_idles)
    for (Request* request : live_requests(in_flight_.back())) request->draft_lag += request->wants_drafts();
  other_work_since_round_ = false;
  last_batch_ = batch;
  last_rows_ = num_rows;
  return true;
}

// Returns the index of the smallest batch size that fits these requests.
size_t Scheduler::size_for(const std::vector<Request*>& requests) const {
  return std::ranges::lower_bound(config_.batch_sizes, std::ssize(requests)) - config_.batch_sizes.begin();
}

// Launches a round of these requests, which are running from then on.
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
    requests = live_requests(round);
  }
  for (Request* request : requests) {
    request->state = RequestState::kRunning;
    ++request->in_flight;
  }
  in_flight_.push_back(std::move(round));
}

// Lets the executor constrain the next tokens of a round that has been launched as far as the target's logits. That
// depends on all tokens before, so rounds in flight are read first. The target's forward pass hides the time it takes.
void Scheduler::constrain(const Round& round, int64_t rows, int64_t max_kv_len) {
  launch_unknown_ = true;
  read_all_rounds();
  const std::vector<Request*> requests = live_requests(round);
  std::vector<Constrained> constrained;
  for (size_t b = 0; b < round.rows.size(); ++b) {
    Request* request = slots_.at(round.rows[b].slot);
    if (request == nullptr || request->id != round.rows[b].request_id || !request->constrained) continue;
    constrained.push_back(
        {static_cast<int64_t>(b), request->slot, Tokens(request->text).subspan(request->num_known_tokens)});
    request->num_known_tokens = std::ssize(request->text);
  }
  call_for(requests, [&] {
    const Span span(recorder_, Work::kLaunch);
    executor_.constrain(num_sent_, constrained, config_.batch_sizes[round.size], rows, max_kv_len);
  });
  launch_unknown_ = false;
}

// Writes one command record and launches a round after it (only the first step if it is constrained). With kCatchUp it
// launches the draft's catch-up instead; with a batch of 0, nothing but the record.
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
    launch_unknown_ = true;
    try {
      if (constrained)
        executor_.forward(batch, rows, max_kv_len);
      else
        executor_.launch(batch, rows, max_kv_len);
    } catch (...) {
      ++failed_launches_;
      launch_error_ = std::current_exception();
      throw;
    }
    launch_unknown_ = false;
    failed_launches_ = 0;
    launch_error_ = nullptr;
  }
  given_back_.clear();
  ++num_sent_;
  if (rows != kCatchUp)
    ++num_launched_;
  else
    other_work_since_round_ = true;
}

void Scheduler::read_all_rounds() {
  while (!in_flight_.empty()) read_oldest_round();
}

void Scheduler::read_oldest_round() {
  // The round leaves the queue first, whatever happens then: results that cannot be read are dropped.
  const Round round = std::move(in_flight_.front());
  in_flight_.pop_front();
  const std::vector<Request*> requests = live_requests(round);
  int64_t slowest = 0;  // ns on another rank
  call_for(requests, [&] {
    wait_for_round(round);
    slowest = agree(round);
  });

  const Span span(recorder_, Work::kRead);
  const int64_t started_at = results_.started_at(round.number);
  const int64_t ended_at = std::max(results_.ended_at(round.number), started_at + slowest);
  if (round.is_first) {
    recorder_.add_first_round(started_at, ended_at, std::ssize(round.rows));
  } else {
    last_round_ns_[round.size][round.kind] = ended_at - started_at;
    recorder_.add_round(started_at, ended_at, std::ssize(round.rows), round.size, round.kind, round.follows);
    budget_.update_cost(round.size, round.level, static_cast<double>(round.rows.size()),
                        static_cast<double>(round.kv_rows), 1e-3 * static_cast<double>(ended_at - started_at));
    update_budget(round);
  }
  bool progress = requests.size() < round.rows.size();  // the pages of requests that have ended come back
  size_t next = 0;
  for (size_t b = 0; b < round.rows.size() && next < requests.size(); ++b) {
    Request& request = *requests[next];
    if (request.id != round.rows[b].request_id) continue;  // it has ended since
    ++next;
    --request.in_flight;
    progress |= read_row(results_.row(round.number, static_cast<int64_t>(b)), request, round.is_first);
  }
  update_counters();
  if (round.is_first) return;  // a request that stalled there begins with another round

  // Every slot stalled although its pages were counted: other holders have some. Once the rounds in flight show the
  // same, the last request ends and frees its pages for the others; a retracted one would only be admitted again.
  no_progress_ = !progress;
  if (no_progress_ && in_flight_.empty()) {
    finish_held(**std::ranges::max_element(requests, {}, &Request::rank), FinishReason::kError, kStalled);
    no_progress_ = false;
  }
}

// Updates the budget with the observed gains of a round's level and those below, and the predicted gains of those
// above. Reports nothing observed for levels with more rows per request than the round before had: if that one cut off
// a piece of text that a larger tree would have accepted whole, this tree begins in its middle and looks worse than it
// is.
void Scheduler::update_budget(const Round& round) {
  LevelResult gains = results_.levels(round.number);
  if (gains.requests <= 0 || gains.predicted.empty()) return;
  gains.predicted.resize(round.predicted + 1);
  gains.observed.resize(round.observed + 1);
  budget_.update_gain(round.size, round.level, static_cast<double>(gains.requests), gains.predicted, gains.observed);
}

// Returns the requests of a round that have not ended since, in the order of its rows.
std::vector<Request*> Scheduler::live_requests(const Round& round) const {
  std::vector<Request*> requests;
  requests.reserve(round.rows.size());
  for (const auto& row : round.rows) {
    Request* request = slots_.at(row.slot);
    if (request != nullptr && request->id == row.request_id) requests.push_back(request);
  }
  return requests;
}

// Applies a round's result to one request. Returns false if it stalled; then its state is as before the round.
bool Scheduler::read_row(const RowResult& result, Request& request, bool is_first) {
  const int64_t count = result.num_valid;
  const auto reason = static_cast<FinishReason>(result.finish_reason);
  const bool continues = reason == FinishReason::kRunning;
  int32_t status = result.status & ~kStalled;

  // The device has to keep these limits. Results that break them are as useless as those of a broken slot.
  const int64_t most = is_first ? 1 : config_.accept_width;
  const int64_t room = std::min({most, request.remaining, config_.max_len - std::ssize(request.text)});
  const bool in_range =
      count >= 0 && count <= room && reason >= FinishReason::kRunning && reason <= FinishReason::kContext;
  // The loop covers the whole width: the processor cannot guess the number of tokens, and a branch that it mispredicts
  // in every row costs more than the copies it saves.
  int32_t signs = 0;
  for (int64_t j = 0; j < config_.accept_width; ++j) signs |= j < count ? result.tokens[j] : 0;
  if (!in_range || signs < 0) status |= kBadLength;
  // A walk that ends without a bonus token has committed the tokens before it, which are those of single steps.
  const bool ended_early = status == kBadLogits && count > 0;
  if (status != 0 && !ended_early) {
    finish_held(request, FinishReason::kError, status);
    return true;
  }
  if (count == 0 && continues) return false;

  const bool was_validated = request.num_validated > 0;
  request.num_validated = validated_rows(request);
  if (count > 0) request.accept(result.tokens, count);
  if (count > 0 && !is_first) request.count_round(count, result.num_nodes);
  if (request.num_logprobs >= 0) result.add_scores(count, request.num_logprobs, *request.scores);
  if (!continues) {
    finish_held(request, reason);  // the draft has no rows of its last tokens
    return true;
  }
  if (ended_early) {
    finish_held(request, FinishReason::kError, status);
    return true;
  }
  request.num_validated = validated_rows(request);
  if (!was_validated) cache_pages(request);
  if (request.streams) queue_update(request, reason);
  return true;
}

// Waits for a round. If the loop also waited for the round before, it knows when this one will end: the thread sleeps
// until shortly before, which uses less of a core than many naps, and polls from then on.
void Scheduler::wait_for_round(const Round& round) {
  const auto done = [&] { return results_.is_published(round.number); };
  const int64_t started = std::exchange(round_started_ns_, 0), expected = last_round_ns_[round.size][round.kind];
  if (done()) return;
  if (started > 0 && round.follows && expected > 0 && expected < kMaxExpectedNs) {
    const Span span(recorder_, Work::kWait);
    const int64_t end = started + expected, margin = kWakeUpNs + expected / kTolerance;
    const int64_t left = end - margin - round::nanoseconds();
    if (left > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left));
    while (!done() && round::nanoseconds() < end + margin) continue;
  }
  wait_until(done);
  round_started_ns_ = round::nanoseconds();  // the next round in flight started when this one ended
}

// Waits until the other ranks have the same results of a round, and returns its longest duration there.
int64_t Scheduler::agree(const Round& round) {
  return executor_.agree(round.number, config_.batch_sizes[round.size], [&](int64_t row) -> std::string {
    if (row >= std::ssize(round.rows)) return "empty row " + std::to_string(row);
    const auto& [slot, request_id] = round.rows[static_cast<size_t>(row)];
    return "request " + std::to_string(request_id) + " (slot " + std::to_string(slot) + ")";
  });
}

// Waits for the device. Polls without sleeping at first, since the wait may be a matter of microseconds.
void Scheduler::wait_until(const std::function<bool()>& done) {
  if (done()) return;
  const Span span(recorder_, Work::kWait);
  using Clock = std::chrono::steady_clock;
  for (const auto end = Clock::now() + std::chrono::microseconds(30); Clock::now() < end;)
    if (done()) return;
  for (int naps = 1; !done(); ++naps) {
    // busy() comes before the last check of the ring, because an idle device publishes nothing more.
    if (naps % 8 == 0 && !executor_.busy() && !done()) {
      launch_unknown_ = true;
      throw std::runtime_error("step: the device is idle and a record is missing, expected launch to publish it");
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
      if (!exception_delivered_) throw;
    }
  }
  update_queue_.close();
  const std::lock_guard lock(mutex_);
  finished_ = true;
  state_changed_.notify_all();
}

// Waits until there is something to do; `again` says that the last turn has left something. Returns false if there is
// nothing to do and never will be.
bool Scheduler::wait_for_work(bool again) {
  std::unique_lock lock(mutex_);
  if (!again) {
    idle_ = true;
    state_changed_.notify_all();
    state_changed_.wait(
        lock, [this] { return !live_ids_.empty() || prefix_.clear_requested || pause_.requested || stopping_; });
  }
  idle_ = !again && live_ids_.empty() && !prefix_.clear_requested && !pause_.requested;
  return !idle_;
}

void Scheduler::settle() {
  std::unique_lock lock(mutex_);
  state_changed_.wait(lock, [this] { return idle_ || !live_ids_.empty(); });
}

}  // namespace specdec::scheduler
